"""The one script of the Redis store, put together from the files in `lua/`. Touches only these files, once per process.

Files whose name begins with an underscore are shared by the verbs; all others are one verb each, with its keys at the top.
In front stands what Lua must not know twice: the transition table and the numbers of `core.lifecycle`, the fields of a job, the
app's prefix, and what outsiders' jobs are made of. All verbs are in one script because a turn is one call
(docs/decisions/0032-redis-store.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files

import msgspec
from msgspec.structs import replace

from tasuki.core.apps import WORDS, template_of
from tasuki.core.fairness import REMEMBERED_GROUPS_MAX
from tasuki.core.job import LEASED, PRIORITY_MAX, READY, TERMINAL, JobSpec, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, RESUMED, RETRY_DELAY_MAX_S, TAKEOVER_TIE_S, TRANSITIONS
from tasuki.core.store_messages import COUNTED, kind_of
from tasuki.core.subject import group_of
from tasuki.stores.common import GENERATIONS_BEGIN_AT
from tasuki.stores.redis.codec import RARE, JobRecord, SpecFacts, template_value

_FIELDS_AT_ONCE = 15  # and the id
_LIST_HEAD_BYTES = 3  # of a msgpack list of 16 elements or more

MARK_TTL_S = 86_400  # how long the last turn of a store that is gone is remembered; a lost answer is asked for within seconds

SHARED = (
    "keys",
    "writes",
    "rules",
    "turn",
    "blobs",
    "queues",
    "outcomes",
    "leases",
    "jobs",
    "attempts",
    "own",
    "fair",
    "shows",
    "reports",
    "tokens",
)
"""In this order: each may use those before it."""

Literal = str | bytes | int | float | Mapping[str, "Literal"]


class Outsiders(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is that somebody made with SET and LPUSH alone; its own are only the job_id and the payload."""

    spec: JobSpec
    submitter: str


def outsiders_of(app: str, template: JobSpec | None = None) -> Outsiders:
    """Those of an app: by default what its jobs over HTTP are."""
    spec = template or template_of(app)
    return Outsiders(spec=replace(spec, job_id="", payload=b""), submitter=f"app:{app}")


@lru_cache
def _files() -> tuple[str, str, str]:
    """The shared files, the verbs, and what runs them."""
    folder = files("tasuki.stores.redis").joinpath("lua")
    shared = [folder.joinpath(f"_{name}.lua").read_text("utf-8") for name in SHARED]
    paths = sorted((path for path in folder.iterdir() if path.name.endswith(".lua")), key=lambda path: path.name)
    verbs = [path.read_text("utf-8") for path in paths if not path.name.startswith("_")]
    # A block of its own for each verb: what it calls local is its own, and Lua allows 200 locals in one block.
    return "\n".join(shared), "\n".join(f"do\n{verb}end" for verb in verbs), folder.joinpath("_main.lua").read_text("utf-8")


def rules_script(body: str) -> str:
    """For tests: the rules alone, and something to ask them."""
    rules = files("tasuki.stores.redis").joinpath("lua", "_rules.lua").read_text("utf-8")
    return f"{_constants()}\n{rules}\n{body}"


def script(app: str, outsiders: Outsiders, result_ttl_s: int) -> str:
    """The whole script of one app."""
    shared, verbs, main = _files()
    own = _own(outsiders)
    head = f"local APP, RESULT_TTL_S = {_literal(app)}, {result_ttl_s}\nlocal OWN = {_literal(own)}"
    return "\n".join([_constants(), _records(), head, shared, "local verbs, reads = {}, {}", verbs, main])


def _constants() -> str:
    tables: dict[str, Literal] = {
        "TRANSITIONS": {
            state.value: {event.value: target.value for (source, event), target in TRANSITIONS.items() if source is state}
            for state in State
        },
        "READY": _set(READY),
        "LEASED": _set(LEASED),
        "TERMINAL": _set(TERMINAL),
        "COUNTED": {state.value: name for state, name in COUNTED.items()},
        "WORDS": {str(state): word for state, word in WORDS.items()},
        "RESUMED": RESUMED,
        "LEASE_MARGIN_S": LEASE_MARGIN_S,
        "TAKEOVER_TIE_S": TAKEOVER_TIE_S,
        "RETRY_DELAY_MAX_S": RETRY_DELAY_MAX_S,
        "PRIORITY_MAX": PRIORITY_MAX,
        "REMEMBERED_GROUPS_MAX": REMEMBERED_GROUPS_MAX,
        "GENERATIONS_BEGIN_AT": GENERATIONS_BEGIN_AT,
        "MARK_TTL_S": MARK_TTL_S,
    }
    return "\n".join(f"local {name} = {_literal(value)}" for name, value in tables.items())


def _records() -> str:
    """The functions that make a job's table of its record, and back; and a table of its facts."""
    names = JobRecord.__struct_fields__
    hot = [name for name in names if name != "rare"]
    # A table that is made with more than 16 fields is made for 32: most jobs have few of them at a time.
    fields, late = hot[:_FIELDS_AT_ONCE], hot[_FIELDS_AT_ONCE:]
    packed = ", ".join("rare or false" if name == "rare" else f"job.{name} or false" for name in names)
    facts = ", ".join(f"{name} = row[{number}] or nil" for number, name in enumerate(SpecFacts.__struct_fields__, 1))
    return f"""
local RARE = {_literal(dict.fromkeys(RARE, 1))}
-- Without a table for the list itself: what follows its head ({_LIST_HEAD_BYTES} bytes) is read one by one.
local function read_record(id, packed)
  local _, {", ".join(names)} = cmsgpack.unpack_limit(packed, {len(names)}, {_LIST_HEAD_BYTES})
  local job = {{ id = id, {", ".join(f"{name} = {name} or nil" for name in fields)} }}
  {"; ".join(f"if {name} then job.{name} = {name} end" for name in late)}
  if rare then
    for name, value in pairs(rare) do
      job[name] = value
    end
    job.has_rare = true
  end
  return job
end
local record = {{ {", ".join(["false"] * len(names))} }} -- one list for all that are packed
local function pack_record(job, rare)
  {", ".join(f"record[{number}]" for number in range(1, len(names) + 1))} = {packed}
  return cmsgpack.pack(record)
end
local function read_facts(row)
  return {{ {facts} }}
end
"""


def _own(outsiders: Outsiders) -> dict[str, Literal]:
    spec = outsiders.spec
    return {
        "spec": template_value(spec, outsiders.submitter),
        "subject": spec.subject,
        "group": group_of(spec.subject),
        "kind": str(kind_of(spec.exec, outsiders.submitter).value),
        "priority": spec.priority,
    }


def _set(states: Iterable[State]) -> dict[str, Literal]:
    return {state.value: 1 for state in sorted(states)}


def _literal(value: Literal) -> str:
    """In Lua's words."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"[{_literal(name)}] = {_literal(part)}" for name, part in value.items()) + " }"
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return '"' + "".join(f"\\{byte:03d}" if byte < 32 or byte > 126 or byte in b'"\\' else chr(byte) for byte in value) + '"'
    return repr(value)
