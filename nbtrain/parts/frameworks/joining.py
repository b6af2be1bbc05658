"""Lets TensorFlow, JAX and Keras connect the ranks without an argument of the user.

TensorFlow finds its processes in the variable ``TF_CONFIG``, JAX in a `ClusterEnv`, and Keras (on
JAX) from JAX, unless it has its own variables. Each is set when the library needs it, so that other
code is not affected. Values of the code or of ``--env`` stay.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from ...part_api import CONNECT_TIMEOUT_S, LOGGER, is_loopback, patch, when_imported
from .world import World, addresses, current_world

TF_CONFIG = "TF_CONFIG"

JAX_EXIT_TIMEOUT_S = 30 * 24 * 3600
"""How long JAX lets a rank that has returned wait for those that train: the run's timeout counts.
JAX's own default is 300 seconds."""


def join_when_asked(inherited: Mapping[str, str]) -> None:
    """Make each library find the ranks when it needs them.

    Variables that are still as `inherited` from the notebook's environment are removed.
    """
    for name, value in inherited.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    strategy = "tensorflow.python.distribute.collective_all_reduce_strategy"
    patch(f"{strategy}:CollectiveAllReduceExtended", "__init__", _create_strategy)
    patch("jax.distributed", "initialize", _initialize_jax)
    when_imported("jax._src.clusters.cluster", _add_cluster)


@functools.cache
def join_early(library: str, inherited: tuple[str, ...]) -> None:
    """Connect this rank with the others by JAX or TensorFlow, and wait for them.

    For before a value of the library is made: afterwards the library refuses to connect.
    `inherited` names variables of the notebook that are removed. Repeated calls do nothing, and
    neither does a call in the only rank.
    """
    if current_world().size > 1:
        join_when_asked({name: os.environ[name] for name in inherited if name in os.environ})
        if library == "JAX":
            importlib.import_module("jax").distributed.initialize()
        elif library == "TensorFlow":
            importlib.import_module("tensorflow").distribute.MultiWorkerMirroredStrategy()


@functools.cache
def set_variables(world: World) -> None:
    """Set ``TF_CONFIG`` and ``KERAS_DISTRIBUTION_*``, for code that reads them.

    Waits up to 10 s for the addresses of all ranks. Without them nothing is set, which is only
    logged and not tried again. Variables that the user has set stay.
    """
    try:
        found = addresses(CONNECT_TIMEOUT_S)  # some live ranks may not run the cell
    except Exception as error:  # a strategy raises it again
        LOGGER.info("the variables of TensorFlow and Keras were not set: %s", error)
        return
    variables = {
        TF_CONFIG: _tf_config(world),
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": found.coordinator,
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(world.size),
        "KERAS_DISTRIBUTION_PROCESS_ID": str(world.rank),
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _tf_config(world: World) -> str:
    """Return TensorFlow's description of the cluster; rank 0 is its chief."""
    cluster = {"worker": list(addresses().workers)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": world.rank}})


def _create_strategy(original: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
    """Create a TensorFlow strategy, with ``TF_CONFIG`` set and one GPU visible.

    Waits for the addresses of all ranks, and raises `LaunchError` if one does not come. A strategy
    with a resolver that reads something else is created as it is.
    """
    given = inspect.signature(original).bind(strategy, *args, **kwargs).arguments
    resolver = given.get("cluster_resolver")
    if resolver is None or type(resolver).__name__ == "TFConfigClusterResolver":
        os.environ.setdefault(TF_CONFIG, _tf_config(current_world()))
        _show_own_gpu()
    original(strategy, *args, **kwargs)


def _show_own_gpu() -> None:
    """Make TensorFlow use one GPU, as the other libraries do, unless it uses some already."""
    config: Any = sys.modules["tensorflow"].config
    gpus = config.list_physical_devices("GPU")
    if len(gpus) > 1 and config.get_visible_devices("GPU") == gpus:
        try:
            config.set_visible_devices(gpus[current_world().local_rank % len(gpus)], "GPU")
        except RuntimeError as error:  # it has computed: it has them all
            LOGGER.info("TensorFlow keeps all GPUs: %s", error)


def jax_world() -> Any:
    """Return what JAX knows of its world, if this process is in one; else None."""
    # Private; seen in JAX 0.10. Where it has moved, there is no world.
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return state if getattr(state, "client", None) is not None else None


def _initialize_jax(original: Any, *args: Any, **named: Any) -> None:
    """Call ``jax.distributed.initialize``, unless the ranks are connected already.

    They are after `join_early`, or after an earlier cell on live ranks. Arguments that name another
    world are passed on, and JAX refuses them.
    """
    if (world := jax_world()) is None:
        if "shutdown_timeout_seconds" in inspect.signature(original).parameters:
            named.setdefault("shutdown_timeout_seconds", JAX_EXIT_TIMEOUT_S)
        original(*args, **named)
        return
    known = (None, world.coordinator_address, world.num_processes, world.process_id)
    if not all(value in known for value in (*args, *named.values())):
        original(*args, **named)  # which refuses another world


def leave_jax() -> None:
    """Wait for JAX's queued work and for all ranks, and leave JAX's world.

    Does nothing outside of one. If rank 0 did not wait, the end of its service would end the other
    ranks by SIGABRT (JAX 0.10). Queued work may need the service, too.
    """
    if jax_world() is not None:
        jax: Any = sys.modules["jax"]
        jax.block_until_ready(jax.live_arrays())
        jax.distributed.shutdown()


def abandon_jax() -> None:
    """Have JAX not wait at exit for the peers of a rank that has failed."""
    if (world := jax_world()) is not None:
        world.shutdown = lambda: None


def _add_cluster(module: Any) -> None:
    """Have JAX know the ranks as a cluster, before those that it finds in the environment.

    In an allocation of Slurm, JAX's own would make each rank a world of one.
    """
    known = module.ClusterEnv._cluster_types
    if any(each.name == "nbtrain" for each in known):
        return

    class NbtrainCluster(module.ClusterEnv):  # type: ignore[misc]
        name = "nbtrain"

        @classmethod
        def is_env_present(cls) -> bool:
            return True

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
        ) -> str:
            """Return the address of JAX's service, which by default has all interfaces.

            It has no password: with all ranks on one host, it gets the loopback interface.
            """
            address = addresses(timeout_secs).coordinator
            host, _, port = address.rpartition(":")
            address = f"{host}:{override_coordinator_port or port}"
            if is_loopback(host):
                os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", address)
            return address

        @classmethod
        def get_process_count(cls) -> int:
            return current_world().size

        @classmethod
        def get_process_id(cls) -> int:
            return current_world().rank

        @classmethod
        def get_local_process_id(cls) -> int | None:
            """Return the number of this rank's GPU among those that it sees."""
            seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
            local_rank = current_world().local_rank
            return local_rank % len(seen) if seen else local_rank

    known.remove(NbtrainCluster)
    known.insert(0, NbtrainCluster)
