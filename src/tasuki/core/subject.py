"""Subjects and patterns: which worker may get which job.

A subject is a dotted routing key (`render.eu.1`); a pattern is what a worker subscribes to.
The rules are those of NATS:

    render.eu.1     a token matches itself, upper and lower case are different
    render.*.1      `*` matches exactly one token
    render.>        `>` matches one or more tokens, and stands last: `render.>` does not match `render`

One rule is our own: the jobs of a subject that ends in `@` and the id of a worker are for that worker alone.

    render.@w1      waits for w1, also while it is away, whatever others subscribe to

Subjects and patterns are checked at the door (`check_subject`, `check_pattern`); the other functions trust that. Pure.
"""

from collections.abc import Hashable, Iterable
from functools import lru_cache
from itertools import takewhile, zip_longest
from typing import Generic, TypeVar

from tasuki.errors import InvalidInput, quoted

DEFAULT_SUBJECT = "job.assign.default"
DEFAULT_PATTERN = "job.assign.>"

SUBJECT_MAX_BYTES = 255
TOKENS_MAX = 32

# Most jobs repeat a few subjects. Only accepted ones are kept, so a cache holds at most 4096 x 255 bytes of text.
_CHECKED_CACHE_SIZE = 4096

ASSIGN, SUBMIT = "job.assign.", "job.submit."


@lru_cache(_CHECKED_CACHE_SIZE)
def check_subject(subject: str) -> str:
    """Return `subject` if a job may carry it, else raise InvalidInput."""
    problem = _problem(subject)
    if problem is None and ("*" in subject or ">" in subject):
        problem = "has a wildcard; '*' and '>' belong in patterns only"
    if problem is not None:
        raise InvalidInput(f"subject {quoted(subject)} {problem}")
    return subject


@lru_cache(_CHECKED_CACHE_SIZE)
def check_pattern(pattern: str) -> str:
    """Return `pattern` if a worker may subscribe to it, else raise InvalidInput."""
    problem = _problem(pattern)
    if problem is None:
        tokens = pattern.split(".")
        if any(len(token) > 1 and ("*" in token or ">" in token) for token in tokens):
            problem = "has a wildcard inside a token; '*' and '>' must be whole tokens"
        elif ">" in tokens[:-1]:
            problem = "has '>' before its end; it must be the last token"
    if problem is not None:
        raise InvalidInput(f"pattern {quoted(pattern)} {problem}")
    return pattern


def assigned(subject: str) -> str:
    """Return the subject or pattern of jobs as it is stored: clients submit to `job.submit.X` what workers take from
    `job.assign.X`."""
    return ASSIGN + subject.removeprefix(SUBMIT) if subject.startswith(SUBMIT) else subject


def check_job_pattern(pattern: str) -> str:
    """Return a pattern of jobs as it is stored, else raise InvalidInput."""
    return assigned(check_pattern(pattern))


def _problem(text: str) -> str | None:
    """Return the problem of a subject or pattern; None if there is none."""
    # Characters are never more than bytes: counting them first keeps a hostile text from being encoded.
    if len(text) > SUBJECT_MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > SUBJECT_MAX_BYTES:
        return f"is too long; at most {SUBJECT_MAX_BYTES} bytes are allowed"
    if not text.isprintable() or " " in text:
        return "has whitespace, a control or another unprintable character"
    if ".." in f".{text}.":
        return "has an empty token; write tokens with one dot between them"
    if text.count(".") >= TOKENS_MAX:
        return f"has too many tokens; at most {TOKENS_MAX} are allowed"
    return None


def matches(pattern: str, subject: str) -> bool:
    """Return True if a job with `subject` may go to a worker that subscribes to `pattern`."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
    elif len(given) != len(wanted):
        return False
    return all(token in ("*", there) for token, there in zip(wanted, given, strict=False))


def intersects(one: str, other: str) -> bool:
    """Return True if there may be a subject that both patterns match."""
    for ours, theirs in zip_longest(one.split("."), other.split(".")):
        if ours is None or theirs is None:
            return False
        if ">" in (ours, theirs):
            return True
        if ours != theirs and "*" not in (ours, theirs):
            return False
    return True


def covers(wide: str, narrow: str) -> bool:
    """Return True if `wide` matches every subject that the pattern `narrow` matches."""
    for ours, theirs in zip_longest(wide.split("."), narrow.split(".")):
        if ours == ">" and theirs is not None:
            return True
        if ours is None or theirs in (None, ">") or ours not in ("*", theirs):
            return False
    return True


@lru_cache(_CHECKED_CACHE_SIZE)
def group_of(subject: str) -> str:
    """Return the group of the subject, which fairness and statistics count by.

    The group is the token after `job.assign.` or `job.submit.`, else the first token. All that begin with `@`, for one worker
    alone, are one group: a broadcast to all workers would make as many groups as there are workers.
    """
    for parent in (ASSIGN, SUBMIT):
        if subject.startswith(parent):
            subject = subject[len(parent) :]
            break
    return "@" if subject.startswith("@") else subject.partition(".")[0]


def only_worker(subject: str) -> str | None:
    """Return the worker that the subject is for, and nobody else, also while it is away: `w1` for `render.@w1`; or None."""
    if "@" not in subject:  # as nearly all
        return None
    before, _, worker_id = subject.rpartition("@")
    return worker_id if worker_id and (not before or before.endswith(".")) else None


def subject_for(target: str, worker_id: str) -> str:
    """Return the subject by which a job reaches one worker that the target meets: `render.@w1` for `render.>`."""
    prefix = literal_prefix(target)
    return f"{prefix}.@{worker_id}" if prefix else f"@{worker_id}"


def base_subject(subject: str) -> str:
    """Return the subject without the worker that it is for: `render` for `render.@w1`."""
    return subject if only_worker(subject) is None else subject.rpartition("@")[0].removesuffix(".")


def is_reached(patterns: Iterable[str], subject: str) -> bool:
    """Return whether a worker that is the only one for a subject may get its jobs: one of its patterns meets what stands before
    its name."""
    before = base_subject(subject)
    return any(not before or matches(pattern, before) or intersects(pattern, f"{before}.>") for pattern in patterns)


def app_subject(app: str) -> str:
    """Return the subject of the jobs of an app that is served over HTTP or kept in Redis; the app is their group."""
    return f"{ASSIGN}{app}"


def literal_prefix(pattern: str) -> str:
    """Return the tokens before the first wildcard: `render.eu` for `render.eu.*`, the empty text for `>`.

    A matching subject is the prefix itself or begins with the prefix and a dot, which is a range in an index.
    """
    return ".".join(takewhile(lambda token: token not in ("*", ">"), pattern.split(".")))


def only_group(pattern: str) -> str | None:
    """Return the group of all subjects that the pattern matches; None if they may be of several."""
    prefix = literal_prefix(pattern)
    if prefix == pattern:
        return group_of(pattern)
    # `job.*.x` may be of any group: the token that names it comes after the prefix.
    return None if prefix in ("", "job", "job.assign", "job.submit") else group_of(prefix + ".x")


T = TypeVar("T", bound=Hashable)


class _TrieNode(Generic[T]):
    """One token of the patterns that run through here. `*` and `>` are children like any other: no subject has them."""

    __slots__ = ("children", "values")

    def __init__(self) -> None:
        self.children: dict[str, _TrieNode[T]] = {}
        self.values: dict[T, int] = {}  # those whose pattern ends here -> when they were added


class SubjectTrie(Generic[T]):
    """A set of (pattern, value) pairs that finds the values for a subject.

    A match walks the subject's tokens once and looks at three children of each node it stands on: the token, `*` and
    `>`. Patterns that part ways with the subject are never visited, so their number does not matter.
    """

    # Distinct subjects in the air at once; when the cache is full it starts anew, which costs one walk for each.
    CACHE_SIZE = 1024

    def __init__(self) -> None:
        self._root: _TrieNode[T] = _TrieNode()
        self._cache: dict[str, tuple[T, ...]] = {}
        self._pair_count = 0
        self._next_order = 0
        self.nodes_visited = 0
        """Number of nodes that all matches so far have visited; answers from the cache add none."""

    def __len__(self) -> int:
        return self._pair_count

    def add(self, pattern: str, value: T) -> None:
        """Add the pair; one that is there already keeps its place."""
        node = self._root
        for token in check_pattern(pattern).split("."):
            node = node.children.setdefault(token, _TrieNode())
        if value in node.values:
            return
        node.values[value] = self._next_order
        self._next_order += 1
        self._pair_count += 1
        self._cache.clear()

    def remove(self, pattern: str, value: T) -> None:
        """Take the pair out, and the nodes that only it needed. KeyError if it is not there."""
        tokens = pattern.split(".")
        path = [self._root]
        for token in tokens:
            child = path[-1].children.get(token)
            if child is None:
                raise KeyError((pattern, value))
            path.append(child)
        if path[-1].values.pop(value, None) is None:
            raise KeyError((pattern, value))
        for parent, token, child in zip(path[-2::-1], reversed(tokens), path[:0:-1], strict=True):
            if child.values or child.children:
                break
            del parent.children[token]
        self._pair_count -= 1
        self._cache.clear()

    def match(self, subject: str) -> tuple[T, ...]:
        """Return the values with a pattern that matches, each once, in the order in which they were added."""
        found = self._cache.get(subject)
        if found is None:
            found = self._walk(check_subject(subject))
            if len(self._cache) >= self.CACHE_SIZE:
                self._cache.clear()
            self._cache[subject] = found
        return found

    def _walk(self, subject: str) -> tuple[T, ...]:
        ends: list[_TrieNode[T]] = []
        here = [self._root]
        for token in subject.split("."):
            below: list[_TrieNode[T]] = []
            for node in here:
                children = node.children
                if rest := children.get(">"):
                    ends.append(rest)
                if literal := children.get(token):
                    below.append(literal)
                if star := children.get("*"):
                    below.append(star)
            self.nodes_visited += len(here)
            here = below
        ends += here
        self.nodes_visited += len(ends)

        order: dict[T, int] = {}
        for node in ends:
            for value, added in node.values.items():
                order[value] = min(added, order.get(value, added))
        return tuple(sorted(order, key=order.__getitem__))
