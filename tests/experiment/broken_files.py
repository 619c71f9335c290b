"""Unexpected contents of a file of a run."""

from __future__ import annotations

import json
from typing import Any


def evaluation(**changes: Any) -> bytes:
    """An evaluation of the best policy with changes in the file, or (by `one`) in its only entry."""
    one = {
        "context": None,
        "task": "t",
        "returns": [1.0, 2.0],
        "lengths": [4, 4],
        "metrics": {},
        "attempts": [],
    }
    one |= changes.pop("one", {})
    facts = {
        "format": 1,
        "run": "r",
        "env": "Walk",
        "policy": "best",
        "epoch": 2,
        "sampled": False,
        "seed": 0,
    }
    return json.dumps({**facts, "results": [one], **changes}).encode()


HUGE = 10**400
BROKEN = {
    "brackets": b"[" * 100_000,
    "deep": b'{"format": 1, "results": ' + b"[" * 900 + b"]" * 900 + b"}",
    "binary": bytes(range(256)),
    "digits": evaluation(one={"returns": [HUGE]}),
    "more_digits": b'{"format": 1' + b"0" * 5000 + b"}",
    "epoch": evaluation(epoch=1e400),
    "context": evaluation(one={"context": [1]}),
    "nested": evaluation(one={"returns": [[1.0], [2.0]]}),
    "ragged": evaluation(one={"returns": [1.0, [2.0]]}),
    "texts": evaluation(one={"returns": ["1", "2"]}),
    "nan": evaluation(one={"returns": [float("nan")]}),
    "infinite": evaluation(one={"returns": [float("inf")]}),
    "null": evaluation(one={"returns": [None]}),
    "entry": evaluation(results=[[]]),
    "results": evaluation(results={"context": 1}),
    "env": evaluation(env=["Walk"]),
    "list": b"[]",
    "empty": b"",
    "format": evaluation(format=99),
}
"""Contents of a JSON file that is no evaluation."""
