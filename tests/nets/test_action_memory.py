"""The action memory: sums of what followed each action, and the heads that read them."""

from __future__ import annotations

import math

import torch

from loxodon.nets import ActionMemory, Actor, Categorical, CriticEnsemble

A, K, E = 3, 2, 4


def given(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    previous = torch.nn.functional.one_hot(torch.randint(0, A, (rows, length)), A).float()
    previous[:, 0] = 0.0
    return torch.randn(rows, length, E), previous


def test_rows_are_fading_sums_over_what_followed_an_action() -> None:
    memory = ActionMemory(E, A, 6, width=K).eval()
    embedded, previous = given(2, 9)
    resets = torch.zeros(2, 9, dtype=torch.bool)
    resets[1, 4] = True
    with torch.no_grad():
        found, values = memory(embedded, previous, resets).unflatten(-1, (A, K)), memory.value(embedded)
    for row, t, a in ((0, 8, 1), (0, 0, 0), (1, 3, 2), (1, 8, 0), (1, 4, 1)):
        begin = 4 if row == 1 and t >= 4 else 0
        expected = sum(
            math.exp((i - t) / 6) * previous[row, i, a] * values[row, i] for i in range(begin, t + 1)
        )
        torch.testing.assert_close(found[row, t, a], torch.as_tensor(expected).asinh())


def test_windows_that_share_a_row_remember_what_each_would_alone() -> None:
    """Windows that begin in mid-episode also remember the action before their first timestep."""
    memory, lengths = ActionMemory(E, A, 6, width=K).eval(), [3, 1, 5]
    embedded, previous = given(1, sum(lengths))
    previous[:, 0, 1] = 1.0
    begins = torch.tensor([0, 3, 4])
    resets = torch.zeros(1, sum(lengths), dtype=torch.bool)
    resets[0, begins] = True
    assert previous[0, begins].any(-1).all()
    with torch.no_grad():
        packed = memory(embedded, previous, resets)
        alone = [
            memory(*parts)
            for parts in zip(*(x.split(lengths, dim=1) for x in (embedded, previous)), strict=True)
        ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_steps_give_the_same_as_sequences() -> None:
    memory = ActionMemory(E, A, 5, width=K).eval()
    embedded, previous = given(3, 40)  # eight horizons
    with torch.no_grad():
        whole, at = memory(embedded, previous), memory.begin(3, torch.device("cpu"))
        for t in range(40):
            found, at = memory.step(at, embedded[:, t], previous[:, t])
            torch.testing.assert_close(found, whole[:, t], atol=1e-5, rtol=1e-4)


def test_heads_use_the_same_weights_for_all_actions() -> None:
    torch.manual_seed(0)
    critics = CriticEnsemble(8, A, 2, True, num_critics=3, d_hidden=16, memory_dim=K)
    actor = Actor(8, A, 2, Categorical, d_hidden=16, memory_dim=K)
    state, rows, swapped = torch.randn(4, 5, 8), torch.randn(4, 5, A, K), [2, 0, 1]

    def of_memory(head: CriticEnsemble | Actor, rows: torch.Tensor) -> torch.Tensor:
        """The contribution of rows to outputs."""
        with torch.no_grad():
            found = (head(torch.cat([state, x.flatten(-2)], dim=-1)) for x in (rows, torch.zeros_like(rows)))
            mine, none = (x.params if isinstance(head, Actor) else x for x in found)
            return mine - none

    for head in (critics, actor):
        assert of_memory(head, rows).abs().max() == 0.0  # zero at first
        torch.nn.init.normal_(head.reader.out.weight)
        added = of_memory(head, rows)
        assert added.abs().min() > 0.0
        torch.testing.assert_close(of_memory(head, rows[..., swapped, :]), added[..., swapped])
    frozen = critics.frozen(torch.tensor([2, 0]))(torch.cat([state, rows.flatten(-2)], dim=-1))
    both = critics(torch.cat([state, rows.flatten(-2)], dim=-1))[:, :, [2, 0]]
    torch.testing.assert_close(frozen, both)
