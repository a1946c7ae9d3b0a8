"""For tests of info and doctor: the schemas of their JSON output, a machine without problems, and a function
that runs the command."""

import subprocess
import sys

import pytest
from engines import environment

LIMIT_S = 60
MIB, GIB = 1 << 20, 1 << 30

# ---- the schema of --json ---------------------------------------------------------------------------------

COUNT = {"type": "integer", "minimum": 0}
CPUS = {"type": "array", "items": COUNT, "minItems": 1}
TEXT, TRUTH = {"type": "string"}, {"type": "boolean"}
GROUPS = {"type": "array", "items": CPUS}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def maybe(schema):
    return {"anyOf": [schema, {"type": "null"}]}


def exactly(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)} | {
        "additionalProperties": False
    }


def array(**properties):
    return {"type": "array", "items": exactly(**properties)}


FACTS = {
    "versions": exactly(shmring=TEXT, python=TEXT, numpy=TEXT, kernel=TEXT),
    "cpus": exactly(online=maybe(COUNT), allowed=CPUS, usable=COUNT),
    "model": exactly(name=TEXT, architecture=TEXT, virtual=maybe(TRUTH)),
    "topology": exactly(
        cores=GROUPS,
        packages=GROUPS,
        caches=array(level=COUNT, nbytes=maybe(COUNT), shared_by=GROUPS),
        nodes=array(node=COUNT, cpus=CPUS),
    ),
    "instruction_set": exactly(chosen=maybe(TEXT), why=TEXT, there={"type": "array", "items": TEXT}),
    "memory": exactly(total_nbytes=maybe(COUNT), room_nbytes=maybe(COUNT), limit=maybe(TEXT)),
    "shared_memory": exactly(nbytes=maybe(COUNT), room_nbytes=maybe(COUNT)),
    "huge_pages": exactly(given=TEXT, shared=TRUTH),
    "descriptors": exactly(soft=maybe(COUNT), hard=maybe(COUNT)),
    "memfd": exactly(works=TRUTH, how=TEXT),
    "posix": exactly(works=TRUTH, how=TEXT),
    "yama": exactly(ptrace_scope=maybe(COUNT)),
    "between_ranks": exactly(
        round_trips=array(
            cpus=CPUS, share=TEXT, round_trip_ns=maybe(COUNT), distance=maybe({"enum": ["near", "far"]})
        ),
        single_copy=exactly(works=TRUTH, why=maybe(TEXT)),
    ),
    "copy_limit": exactly(
        nbytes=COUNT, ranks=COUNT, alone_gb_per_s={"type": "number"}, together_gb_per_s={"type": "number"}
    ),
    "tuning": exactly(
        path=maybe(TEXT),
        ranks={"type": "array", "items": COUNT},
        state={"enum": ["off", "absent", "unusable", "used"]},
        why=maybe(TEXT),
    ),
    "settings": exactly(
        given=TEXTS,
        wrong={"type": "array", "items": TEXT},
        unknown_names={"type": "object", "additionalProperties": maybe(TEXT)},
    ),
    "job": exactly(
        launcher=maybe(TEXT), rank=maybe(COUNT), size=maybe(COUNT), local_size=maybe(COUNT),
        wrong=maybe(TEXT), commands=TEXTS, kubernetes=TRUTH, slurm_allocation=TRUTH,
    ),
    "threads": exactly(given=TEXTS, free_threaded=TRUTH),
    "gloo": exactly(replaced=TRUTH, why=TEXT),
    "jax": exactly(version=maybe(TEXT), calls_through=maybe({"enum": ["XLA", "callbacks"]})),
    "libraries": {"type": "object", "additionalProperties": maybe(TEXT)},
}  # fmt: skip
REPORT = exactly(**{name: {"anyOf": [fact, exactly(unknown=TEXT)]} for name, fact in FACTS.items()})
FINDINGS = exactly(
    problems=COUNT,
    notes=COUNT,
    findings=array(
        level={"enum": ["ok", "note", "problem"]},
        about=TEXT,
        what={"type": "string", "minLength": 1},
        fix=maybe(TEXT),
    ),
)


def validate(found, schema):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(schema).validate(found)


def run(*arguments, around=(), preparation=None, **variables):
    command = [*around, sys.executable, "-m", "shmring", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment(**variables),
        preexec_fn=preparation,
    )  # fmt: skip


# ---- a machine ------------------------------------------------------------------------------------------

WELL = {
    "versions": {"shmring": "1", "python": "3", "numpy": "2", "kernel": "Linux 6"},
    "cpus": {"online": 4, "allowed": [0, 1, 2, 3], "usable": 4},
    "model": {"name": "A", "architecture": "x86_64", "virtual": False},
    "topology": {
        "cores": [[0], [1], [2], [3]],
        "packages": [[0, 1, 2, 3]],
        "caches": [{"level": 3, "nbytes": 32 * MIB, "shared_by": [[0, 1], [2, 3]]}],
        "nodes": [{"node": 0, "cpus": [0, 1, 2, 3]}],
    },
    "instruction_set": {"chosen": "avx2", "why": "the best", "there": ["avx2", "sse2"]},
    "memory": {"total_nbytes": 8 * GIB, "room_nbytes": 4 * GIB, "limit": "this host's memory (8192 MiB)"},
    "shared_memory": {"nbytes": 4 * GIB, "room_nbytes": 3 * GIB},
    "huge_pages": {"given": "within_size", "shared": True},
    "descriptors": {"soft": 1024, "hard": 4096},
    "memfd": {"works": True, "how": "sealed"},
    "posix": {"works": True, "how": "O_TMPFILE"},
    "yama": {"ptrace_scope": 0},
    "between_ranks": {
        "round_trips": [{"cpus": [0, 1], "share": "one L3", "round_trip_ns": 90, "distance": "near"}],
        "single_copy": {"works": True, "why": None},
    },
    "copy_limit": {"nbytes": 32 * MIB, "ranks": 4, "alone_gb_per_s": 9.0, "together_gb_per_s": 20.0},
    "tuning": {"path": "/t.json", "ranks": [2, 4], "state": "used", "why": None},
    "settings": {"given": {}, "wrong": [], "unknown_names": {}},
    "job": {
        "launcher": None, "rank": None, "size": None, "local_size": None, "wrong": None,
        "commands": {}, "kubernetes": False, "slurm_allocation": False,
    },
    "threads": {"given": {"OMP_NUM_THREADS": "1"}, "free_threaded": False},
    "gloo": {"replaced": False, "why": "torch is not installed"},
    "jax": {"version": None, "calls_through": None},
    "libraries": {"torch": None},
}  # fmt: skip
