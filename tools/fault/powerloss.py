"""What a power loss may leave on the disk, computed from the log of one run (no privileges, no reboot).

The model is POSIX at its worst. Bytes written but not fsynced may be there in full, in half, as zeros, or not at all;
a name created, renamed or removed since its directory was last fsynced may be so or not, each on its own. What was
synced is there. States are rebuilt in a directory and handed to a check.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from tools.fault.ops import Op

CHOICES = ("old", "torn", "half", "full")
Tree = dict[str, bytes | None | str]
"""Relative path -> bytes of a file, None for a directory, text for a link."""


@dataclass
class Node:
    """A file (bytes), a directory (entries) or a link (text): what is on the disk and what the process sees."""

    kind: str
    durable: bytes = b""
    now: bytes = b""
    emptied: bool = False
    durable_entries: dict[str, int] = field(default_factory=dict)
    entries: dict[str, int] = field(default_factory=dict)


@dataclass
class Change:
    """One change of names that waits for the fsync of its directories: remove `old`, add `new`."""

    waits_for: set[int]
    node: int
    old: tuple[int, str] | None = None
    new: tuple[int, str] | None = None

    def apply(self, entries: dict[int, dict[str, int]]) -> None:
        if self.old is not None and entries[self.old[0]].get(self.old[1]) == self.node:
            del entries[self.old[0]][self.old[1]]
        if self.new is not None:
            entries[self.new[0]][self.new[1]] = self.node


class Disk:
    """A file system in two versions, durable and present, that follows a log of operations."""

    def __init__(self, base: Path) -> None:
        self.nodes: dict[int, Node] = {}
        self.changes: list[Change] = []
        self.root = self._read(base)

    def _read(self, path: Path) -> int:
        if path.is_symlink():
            return self._add(Node("link", now=os.fsencode(os.readlink(path))))
        if not path.is_dir():
            data = path.read_bytes()
            return self._add(Node("file", durable=data, now=data))
        entries = {child.name: self._read(child) for child in sorted(path.iterdir())}
        return self._add(Node("dir", durable_entries=dict(entries), entries=entries))

    def _add(self, node: Node) -> int:
        self.nodes[len(self.nodes)] = node
        return len(self.nodes) - 1

    def find(self, path: str) -> int | None:
        """Return the number of the node the process sees at `path`, None when it was removed."""
        at = self.root
        for part in () if path == "." else path.split("/"):
            if part not in self.nodes[at].entries:
                return None
            at = self.nodes[at].entries[part]
        return at

    def _place(self, path: str) -> tuple[int, str]:
        parent, _, name = path.rpartition("/")
        found = self.find(parent or ".")
        if found is None:
            raise ValueError(f"the log names {path!r}, whose directory was never made: something bypassed the shim")
        return found, name

    def _change(self, node: int, old: tuple[int, str] | None, new: tuple[int, str] | None) -> None:
        change = Change({place[0] for place in (old, new) if place is not None}, node, old, new)
        change.apply({number: found.entries for number, found in self.nodes.items()})
        self.changes.append(change)

    def follow(self, op: Op) -> None:
        """Apply one operation of the log."""
        if op.error or op.flag not in ("done", "killed after", "shortened"):
            return
        if op.op == "copy":
            raise ValueError(f"{op.path}: bytes copied inside the kernel are not in the log")
        if op.op == "rename":
            old = self._place(op.path)
            self._change(self.nodes[old[0]].entries[old[1]], old, self._place(op.path2))
        elif op.op in ("unlink", "rmdir"):
            old = self._place(op.path)
            self._change(self.nodes[old[0]].entries[old[1]], old, None)
        elif op.op == "link":
            old = self._place(op.path)
            self._change(self.nodes[old[0]].entries[old[1]], None, self._place(op.path2))
        elif op.op == "mkdir":
            self._change(self._add(Node("dir")), None, self._place(op.path))
        elif op.op == "symlink":
            self._change(self._add(Node("link", now=op.data)), None, self._place(op.path))
        elif op.op == "open":
            if op.created:
                self._change(self._add(Node("file")), None, self._place(op.path))
            elif op.truncated:
                node = self._node(op.path)
                node.now, node.emptied = b"", True
        else:
            number = self.find(op.path)
            if number is not None:  # else an open file without a name any more
                self._content(op, number)

    def _node(self, path: str) -> Node:
        number = self.find(path)
        assert number is not None, path
        return self.nodes[number]

    def _content(self, op: Op, number: int) -> None:
        node = self.nodes[number]
        if op.op == "write":
            if len(op.data) != op.done:
                raise ValueError(f"{op.path}: the log was made without data")
            padded = node.now.ljust(op.offset, b"\0")
            node.now = padded[: op.offset] + op.data + padded[op.offset + len(op.data) :]
        elif op.op == "truncate":
            node.now = node.now[: op.offset].ljust(op.offset, b"\0")
            node.emptied = node.emptied or not op.offset
        elif node.kind == "file":
            node.durable, node.emptied = node.now, False
        else:
            for change in self.changes:
                change.waits_for.discard(number)
                if not change.waits_for:
                    change.apply({n: found.durable_entries for n, found in self.nodes.items()})
            self.changes = [change for change in self.changes if change.waits_for]

    def unsynced(self) -> list[int]:
        """Return the files whose present bytes are not durable."""
        return [number for number, node in self.nodes.items() if node.kind == "file" and node.durable != node.now]

    def after_loss(self, files: dict[int, str], changes: Sequence[bool]) -> Tree:
        """Return the tree after a power loss: a choice for each unsynced file, done or not for each change."""
        entries = {number: dict(node.durable_entries) for number, node in self.nodes.items()}
        for change, done in zip(self.changes, changes, strict=True):
            if done:
                change.apply(entries)
        tree: Tree = {}

        def walk(number: int, path: str) -> None:
            node = self.nodes[number]
            if node.kind == "dir":
                tree[path or "."] = None
                for name, child in sorted(entries[number].items()):
                    walk(child, f"{path}/{name}" if path else name)
            elif node.kind == "link":
                tree[path] = os.fsdecode(node.now)
            else:
                tree[path] = remains(node, files.get(number, "old"))

        walk(self.root, "")
        return tree

    def present(self) -> Tree:
        """Return the tree as the process sees it."""
        return self.after_loss(dict.fromkeys(self.unsynced(), "full"), [True] * len(self.changes))


def remains(node: Node, choice: str) -> bytes:
    """Return what is left of a file: old, torn, half, or full.

    Torn and half concern what changed since the last sync: an appended part as zeros or cut in the middle, a file that
    was emptied and written anew as nothing or cut in the middle, a shortened file as not yet or half shortened.
    """
    if choice in ("old", "full"):
        return node.durable if choice == "old" else node.now
    kept = b"" if node.emptied else _common(node.durable, node.now)
    if len(kept) == len(node.now):
        return node.durable[: (len(node.durable) + len(kept)) // 2] if choice == "half" else node.durable
    added = node.now[len(kept) :]
    if choice == "half":
        return kept + added[: len(added) // 2]
    return kept + bytes(len(added)) if kept else b""


def _common(a: bytes, b: bytes) -> bytes:
    length = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


@dataclass(frozen=True)
class Loss:
    """State `number`. `after` operations of the log had returned when the power went."""

    number: int
    after: int
    tree: Tree
    what: str


def losses(base: Path, ops: Sequence[Op], *, random_per_point: int, seed: int) -> Iterator[Loss]:
    """Yield distinct states after each prefix of the log: six corners, each single deviation's kind at random."""
    disk, chance, seen = Disk(base), random.Random(seed), set()
    for after in range(len(ops) + 1):
        if after:
            disk.follow(ops[after - 1])
        files, n_changes = disk.unsynced(), len(disk.changes)
        plans = [
            (dict.fromkeys(files, choice), [done] * n_changes)
            for done in (False, True)
            for choice in CHOICES
            if done or choice == "old"
        ]
        for _ in range(random_per_point if files or n_changes else 0):
            odds = chance.choice((0.1, 0.5, 0.9))
            plans.append(
                ({file: chance.choice(CHOICES) for file in files}, [chance.random() < odds for _ in range(n_changes)])
            )
        for choice, done in plans:
            tree = disk.after_loss(choice, done)
            digest = _digest(tree)
            if digest not in seen:
                seen.add(digest)
                names = ",".join(sorted(set(choice.values()))) or "nothing unsynced"
                yield Loss(len(seen), after, tree, f"files {names}; {sum(done)} of {n_changes} name changes")


def explore(
    base: Path,
    ops: Sequence[Op],
    check: Callable[[Path, Loss], str | None],
    folder: Path,
    *,
    limit: int,
    random_per_point: int = 8,
    seed: int = 0,
    stop_at: int | None = None,
) -> tuple[int, list[str]]:
    """Check up to `limit` states in random order; return (states checked, problems with their states).

    Args:
        base: the tree before the log began, taken as durable. folder: where states are built, each in its own place.
        check: gets the rebuilt root and the state; returns a problem or None.
        stop_at: end after this many problems.
    """
    states = list(losses(base, ops, random_per_point=random_per_point, seed=seed))
    chosen = random.Random(seed).sample(states, min(limit, len(states)))
    problems: list[str] = []
    for number, loss in enumerate(chosen):
        root = folder / f"loss-{number}"
        build(loss.tree, root)
        problem = check(root, loss)
        shutil.rmtree(root)
        if problem is not None:
            last = ops[loss.after - 1] if loss.after else None
            problems.append(f"seed {seed}, after operation {loss.after} ({last}): {loss.what}: {problem}")
            if len(problems) == stop_at:
                return number + 1, problems
    return len(chosen), problems


def build(tree: Tree, root: Path) -> None:
    """Make the tree as real files below `root`."""
    for path, content in tree.items():
        target = root / path
        if content is None:
            target.mkdir(mode=0o700)
        elif isinstance(content, str):
            target.symlink_to(content)
        else:
            target.write_bytes(content)


def replay(base: Path, ops: Sequence[Op]) -> Tree:
    """Return the tree at the end of the log; equal to the real one unless something bypassed the shim."""
    disk = Disk(base)
    for op in ops:
        disk.follow(op)
    return deepcopy(disk.present())


def read_tree(root: Path) -> Tree:
    """Return a real directory as a Tree."""
    return Disk(root).present()


def _digest(tree: Tree) -> bytes:
    digest = hashlib.sha256()
    for path, content in tree.items():
        data = content if isinstance(content, bytes) else repr(content).encode()
        digest.update(f"{path}\0{type(content).__name__}\0{len(data)}\0".encode() + data)
    return digest.digest()
