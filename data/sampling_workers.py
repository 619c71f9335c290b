"""Processes that sample batches into shared memory, as long as the run lasts; nothing here needs torch."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Protocol

from .collate import Arrays, Specs, block_bytes, block_views

# Batches that each worker may have ready. The parent copies a batch when its turn comes and gives the memory
# back at once, so the second one is filled meanwhile.
_NUM_SLOTS = 2
_JOIN_S = 5.0
_GRACE_S = 30  # a worker lives on for so long after SIGTERM, unless its parent ends it before


class BatchSource(Protocol):
    """What runs in a worker; it is sent there by pickling where processes are spawned."""

    def sample(
        self, epoch: int, num_batches: int, worker: int, num_workers: int, allocate: Callable[[Specs], Arrays]
    ) -> Iterator[Arrays]:
        """Yield batches w, w + W, w + 2W, ... of the epoch, for worker w of W, in memory from `allocate`."""
        ...


class SamplingWorkers:
    """Worker processes that take turns at the batches of an epoch, and prepare the next ones meanwhile.

    Each worker owns two blocks of shared memory. It writes a batch into one and sends its layout through a
    pipe; the parent copies the batch and gives the block back. Blocks grow with the batches and are never
    named, so nothing is left behind, however the processes end.

    Args:
        source: makes the batches.
        num_workers: processes.
    """

    def __init__(self, source: BatchSource, num_workers: int) -> None:
        self._serial = 0
        self._workers: list[_Worker] = []
        for index in range(num_workers):
            inherited = [worker.conn for worker in self._workers]
            self._workers.append(_Worker(source, index, num_workers, inherited))
        self._finalize = Finalize(self, _end, args=(self._workers,), exitpriority=10)

    def epoch(self, epoch: int, num_batches: int) -> Iterator[Arrays]:
        """Yield the batches of one epoch; each is valid until the next one is asked for.

        An epoch that was left unfinished ends when another begins.

        Raises:
            RuntimeError: If a worker process died.
            Exception: What the source raised in a worker, with the traceback of the worker as its cause.
        """
        self._serial += 1
        serial = self._serial
        for worker in self._workers:
            self._guard(worker, worker.begin, serial, epoch, num_batches)
        for i in range(num_batches):
            worker = self._workers[i % len(self._workers)]
            outcome = self._guard(worker, worker.receive, serial)
            if isinstance(outcome, _Failure):  # raised here, as the guard would take some for a death
                outcome.raise_again()
            slot, arrays = outcome
            yield arrays
            if serial != self._serial:
                return
            self._guard(worker, worker.give_back, slot)

    @property
    def closed(self) -> bool:
        """True after `close`, and after the death of a worker."""
        return not self._finalize.still_active()

    def close(self) -> None:
        """End the processes."""
        self._serial += 1
        self._finalize()

    def _guard(self, worker: _Worker, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that talks to a worker; if its process is gone, end the others too and say so."""
        try:
            return function(*args)
        except (EOFError, ConnectionError) as error:
            death = worker.describe_death()
            self.close()
            raise RuntimeError(
                f"{death} while it sampled batches. The usual reasons are too little memory (each worker "
                "holds two batches and its own cache of files) or a crash in a dataset's own code. Fix: set "
                "Experiment.dloader_workers or batch_size lower, or dloader_workers = 0 to see the crash in "
                "this process."
            ) from error


class _Worker:
    """The parent's end of one worker process."""

    def __init__(
        self, source: BatchSource, index: int, num_workers: int, inherited: list[Connection]
    ) -> None:
        self._index = index
        self.conn, other = multiprocessing.Pipe()
        self._process: BaseProcess = multiprocessing.Process(
            target=_work,
            args=(source, index, num_workers, other, [*inherited, self.conn]),
            name=f"loader-{index}",
            daemon=True,
        )
        self._process.start()
        other.close()  # or the end of the process would not end the connection
        self._blocks: dict[int, mmap.mmap] = {}
        self._unreturned: int | None = None

    def begin(self, serial: int, epoch: int, num_batches: int) -> None:
        """Give an order, and back the memory of a batch that nobody waits for any more."""
        if self._unreturned is not None:
            self.give_back(self._unreturned)
        self.conn.send((serial, epoch, num_batches))

    def receive(self, serial: int) -> tuple[int, Arrays] | _Failure:
        """Wait for the next batch of this order; returns its slot and its arrays, or what went wrong."""
        while True:
            kind, *rest = self._receive()
            if kind == "block":
                slot, num_bytes = rest
                with _socket_of(self.conn) as sock:
                    handles = socket.recv_fds(sock, 1, 1)[1]
                if not handles:
                    raise EOFError
                self._blocks[slot] = mmap.mmap(handles[0], num_bytes)
                os.close(handles[0])
                continue
            sent_serial, *rest = rest
            if kind == "error" and sent_serial == serial:
                return _Failure(self._index, *rest)
            if kind == "batch":
                slot, specs = rest
                self._unreturned = slot
                if sent_serial == serial:
                    return slot, block_views(self._blocks[slot], specs)
                self.give_back(slot)

    def give_back(self, slot: int) -> None:
        """Let the worker write to this slot again."""
        self._unreturned = None
        self.conn.send(slot)

    def describe_death(self) -> str:
        """Say how the process ended."""
        self._process.join(_JOIN_S)
        code = self._process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
        return f"Loader worker {self._index} (process {self._process.pid}) ended with {how}"

    def close(self) -> None:
        """Tell the process to end, and close the connection."""
        # Closing alone would do only if no process that was started meanwhile had a copy of this end.
        with contextlib.suppress(OSError):
            self.conn.send(None)
        self.conn.close()

    def join(self) -> None:
        """Wait until the process has ended; if it hangs, kill it."""
        self._process.join(_JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        # The connection alone would not tell of the end if a process that the dataset started has a copy.
        if self.conn not in wait([self.conn, self._process.sentinel]):
            raise EOFError
        return self.conn.recv()


class _WorkerTraceback(Exception):  # noqa: N818 (a carrier of text, shown as the cause of the error)
    """The traceback of an error in a worker process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _socket_of(conn: Connection) -> socket.socket:
    """The socket under a connection, on which open files can be sent too."""
    return socket.socket(fileno=os.dup(conn.fileno()))


@dataclass(frozen=True)
class _Failure:
    """An error in a worker.

    Attributes:
        index: of the worker.
        error: what was raised, None if it cannot be pickled.
        text: its traceback.
    """

    index: int
    error: Exception | None
    text: str

    def raise_again(self) -> None:
        """Raise it in this process."""
        cause = _WorkerTraceback(self.text)
        if self.error is not None:
            raise self.error from cause
        summary = self.text.strip().splitlines()[-1]
        raise RuntimeError(
            f"Loader worker {self.index} failed: {summary}. Fix: see the worker's traceback above."
        ) from cause


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.close()
    for worker in workers:
        worker.join()


# ---- inside a worker process ----


def _end_later(*_: object) -> None:
    """A preempted machine asks all processes to end: the parent, which needs this one, first saves."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_GRACE_S)


class _NewOrder(Exception):  # noqa: N818 (not an error)
    """The parent has begun another epoch; its order is the argument."""


class _ParentGone(Exception):  # noqa: N818 (not an error)
    """The other end of the connection is closed."""


class _Slots:
    """The shared memory of one worker, which of it is free, and the connection to the parent."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._blocks: dict[int, mmap.mmap] = {}
        self._free = list(range(_NUM_SLOTS))
        self._filling: tuple[int, Specs] | None = None

    def allocate(self, specs: Specs) -> Arrays:
        """Return arrays in the next free slot; waits for one."""
        while not self._free:
            message = self._receive()
            if not isinstance(message, int):
                raise _NewOrder(message)
            self._free.append(message)
        slot, num_bytes = self._free[0], block_bytes(specs)
        if slot not in self._blocks or len(self._blocks[slot]) < num_bytes:
            self._grow(slot, num_bytes)
        self._filling = slot, specs
        return block_views(self._blocks[slot], specs)

    def send_batch(self, serial: int) -> None:
        """Tell the parent that what was allocated last is full."""
        if self._filling is not None:
            self._free.remove(self._filling[0])
            self.send("batch", serial, *self._filling)

    def send(self, *message: Any) -> None:
        """Send a message to the parent."""
        try:
            self._conn.send(message)
        except ConnectionError as error:
            raise _ParentGone from error

    def wait_for_order(self) -> tuple[int, int, int]:
        """Wait until the parent begins an epoch."""
        while isinstance(message := self._receive(), int):
            self._free.append(message)
        order: tuple[int, int, int] = message
        return order

    def _receive(self) -> Any:
        try:
            message = self._conn.recv()
        except (EOFError, ConnectionError) as error:
            raise _ParentGone from error
        if message is None:
            raise _ParentGone
        return message

    def _grow(self, slot: int, num_bytes: int) -> None:
        """Replace a block by a larger one and hand it to the parent."""
        num_bytes += num_bytes // 8  # so that slightly longer batches fit too
        with _anonymous_file() as handle:
            os.ftruncate(handle, num_bytes)
            self._blocks[slot] = mmap.mmap(handle, num_bytes)
            self.send("block", slot, num_bytes)
            with _socket_of(self._conn) as sock:
                socket.send_fds(sock, [b"f"], [handle])


@contextlib.contextmanager
def _anonymous_file() -> Iterator[int]:
    """A file without a name: in memory where the system has such files, else in the temporary folder.

    Unlike /dev/shm, which containers often limit to 64 MB, the former has no limit of its own.
    """
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("loxodon-batch")
        try:
            yield handle
        finally:
            os.close(handle)
    else:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()


def _work(
    source: BatchSource, worker: int, num_workers: int, conn: Connection, inherited: list[Connection]
) -> None:
    """Serve orders until the parent closes the connection or is gone."""
    for end in inherited:  # the parent's ends: while they are open here, nobody sees them close there
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides what it means
    signal.signal(signal.SIGTERM, _end_later)
    slots = _Slots(conn)
    with contextlib.suppress(_ParentGone):
        order = slots.wait_for_order()
        while True:
            serial, epoch, num_batches = order
            try:
                for _ in source.sample(epoch, num_batches, worker, num_workers, slots.allocate):
                    slots.send_batch(serial)
                order = slots.wait_for_order()
            except _NewOrder as new:
                order = new.args[0]
            except _ParentGone:
                raise
            except Exception as error:  # whatever a dataset raises is raised again in the parent
                slots.send("error", serial, _sendable(error), traceback.format_exc())
                order = slots.wait_for_order()


def _sendable(error: Exception) -> Exception | None:
    """Return the error if it survives the way to the parent, else None."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # a class that does not survive may fail in any way
        return None
    return error if type(copy) is type(error) else None
