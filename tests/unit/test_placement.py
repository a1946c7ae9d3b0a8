"""The CPUs to which ranks are bound, on machines unlike this one, as /sys shows them."""

import pytest

from shmring._system import cpu_topology, cpulist


def machine(root, cpus, *, nodes=None, hide=()):
    """A /sys/devices/system with CPUs {number: (core's CPUs, last cache's CPUs)} and nodes {index: CPUs}."""
    files = {f"node/node{index}/cpulist": numbers for index, numbers in (nodes or {}).items()}
    for number, (core, cache) in cpus.items():
        own = f"cpu/cpu{number}"
        files |= {
            f"{own}/topology/core_cpus_list": core,
            f"{own}/topology/thread_siblings_list": core,
            f"{own}/cache/index0/level": "1",
            f"{own}/cache/index0/shared_cpu_list": core,
            f"{own}/cache/index3/level": "3",
            f"{own}/cache/index3/shared_cpu_list": cache,
        }
    for name, text in files.items():
        if not any(word in name for word in hide):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n")
    return str(root)


def two_sockets(root, **options):
    """Make 2 sockets of 4 cores of 2 threads; the second threads come after all first ones, as on Intel's."""
    cpus = {}
    for number in range(16):
        core, socket = number % 8, number % 8 // 4
        cpus[number] = (f"{core},{core + 8}", "0-3,8-11" if socket == 0 else "4-7,12-15")
    return machine(root, cpus, nodes={0: "0-3,8-11", 1: "4-7,12-15"}, **options)


def clusters(root):
    """Make one node of 8 cores without threads, of which every 4 share an L3, as on AMD's."""
    caches = ["0-3", "4-7"]
    cpus = {number: (str(number), caches[number // 4]) for number in range(8)}
    return machine(root, cpus, nodes={0: "0-7"})


def by_core(root, nprocs, usable):
    return [cpulist.spell(share) for share in cpu_topology.by_core(cpu_topology.read(usable, root), nprocs)]


def by_node(root, nprocs, usable):
    return [cpulist.spell(share) for share in cpu_topology.by_node(cpu_topology.read(usable, root), nprocs)]


@pytest.mark.parametrize(
    ("nprocs", "shares"),
    [
        (1, ["0-15"]),
        (2, ["0-3,8-11", "4-7,12-15"]),
        (3, ["0-1,8-9", "2-3,10-11", "4-7,12-15"]),  # no rank on both sockets
        (4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        (8, [f"{core},{core + 8}" for core in range(8)]),
        (9, []),
    ],
)
def test_ranks_get_whole_cores_and_neighbours_one_socket(tmp_path, nprocs, shares):
    assert by_core(two_sockets(tmp_path), nprocs, range(16)) == shares


@pytest.mark.parametrize(
    ("nprocs", "shares"),
    [
        (2, ["0-3", "4-7"]),
        (3, ["0-1", "2-3", "4-7"]),
        (4, ["0-1", "2-3", "4-5", "6-7"]),
        (5, ["0", "1", "2-3", "4-5", "6-7"]),
    ],
)
def test_ranks_stay_under_one_cache(tmp_path, nprocs, shares):
    assert by_core(clusters(tmp_path), nprocs, range(8)) == shares


def test_with_fewer_ranks_than_caches_their_shares_are_even(tmp_path):
    cpus = {number: (str(number), f"{number // 2 * 2}-{number // 2 * 2 + 1}") for number in range(6)}
    assert by_core(machine(tmp_path, cpus), 2, range(6)) == ["0-2", "3-5"]


def test_only_usable_cpus_are_given(tmp_path):
    # Socket 0 has one core and a half, socket 1 three cores; CPU 15 is offline, so no rank may use it.
    usable = [0, 8, 9, 4, 5, 12, 7]
    root = two_sockets(tmp_path)
    assert by_core(root, 2, usable) == ["0,8-9", "4-5,7,12"]
    assert by_core(root, 5, usable) == ["0,8", "9", "4,12", "5", "7"]
    assert by_core(root, 6, usable) == []


@pytest.mark.parametrize(
    ("nprocs", "shares"),
    [
        (1, ["0-15"]),
        (2, ["0-3,8-11", "4-7,12-15"]),
        (3, ["0-3,8-11"] * 2 + ["4-7,12-15"]),
        (40, ["0-3,8-11"] * 20 + ["4-7,12-15"] * 20),
    ],
)
def test_by_node_ranks_share_a_node(tmp_path, nprocs, shares):
    assert by_node(two_sockets(tmp_path), nprocs, range(16)) == shares


def test_a_larger_node_has_more_ranks(tmp_path):
    assert by_node(two_sockets(tmp_path), 4, [0, 4, 5, 6]) == ["0", "4-6", "4-6", "4-6"]


@pytest.mark.parametrize("hide", [("node/",), ("cache/",), ("topology/",), ("core_cpus_list",), ("cpu",)])
def test_missing_facts_are_not_needed(tmp_path, hide):
    root = two_sockets(tmp_path, hide=hide)
    for nprocs in (1, 2, 3, 8):
        shares = cpu_topology.by_core(cpu_topology.read(range(16), root), nprocs)
        assert len(shares) == nprocs
        assert sorted(number for share in shares for number in share) == list(range(16))


def test_without_any_topology_each_cpu_is_a_core_of_one_node(tmp_path):
    root = str(tmp_path / "nothing")
    assert by_core(root, 3, range(4)) == ["0", "1", "2-3"]
    assert by_core(root, 5, range(4)) == []
    assert by_node(root, 2, range(4)) == ["0-3", "0-3"]


def test_nonsense_counts_as_not_told(tmp_path):
    cpus = dict.fromkeys(range(4), ("0-x", "-1"))
    assert by_core(machine(tmp_path, cpus, nodes={0: ""}), 4, range(4)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("nprocs", range(1, 17))
@pytest.mark.parametrize("build", [two_sockets, clusters])
def test_everything_is_given_to_exactly_one(tmp_path, build, nprocs):
    topology = cpu_topology.read(range(8), build(tmp_path))
    shares = cpu_topology.by_core(topology, nprocs)
    assert bool(shares) == (nprocs <= len(cpu_topology.cores_of(topology)))
    given = [number for share in shares for number in share]
    assert given == [] or sorted(given) == list(range(8))


def test_threads_are_those_of_the_share_divided_among_who_has_it():
    assert cpu_topology.threads_of([[0, 1], [2, 3, 4]]) == [2, 3]
    assert cpu_topology.threads_of([[0, 1, 2, 3]] * 2 + [[4]] * 3) == [2, 2, 1, 1, 1]


def test_this_machine_is_understood():
    assert cpu_topology.read([0])[0].number == 0


# --- ranges ---


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0,2-3", [0, 2, 3]), ("5,1-2,2", [1, 2, 5]), (" 0-1\n", [0, 1])]
)
def test_ranges_are_parsed(text, numbers):
    assert cpulist.parse(text) == numbers


@pytest.mark.parametrize("text", ["", "-", "a", "1-", "-1", "3-2", "0,,1", "1.5", "²", "0-9999999"])
def test_wrong_ranges_are_refused(text):
    with pytest.raises(ValueError, match=r"neither a number nor a range|ends before it begins"):
        cpulist.parse(text)


def test_ranges_are_spelt_as_short_as_can_be():
    assert cpulist.spell([3, 0, 1, 7, 2]) == "0-3,7"
    assert cpulist.spell([0, 1]) == "0-1"
    assert cpulist.spell([]) == ""
    assert cpulist.parse(cpulist.spell([0, 2, 4, 5])) == [0, 2, 4, 5]
