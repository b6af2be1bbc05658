"""Lets TensorFlow, JAX and Keras join the ranks without an argument of the user's.

Each library finds its processes in its own way: TensorFlow in the variable ``TF_CONFIG``, JAX in a
`ClusterEnv`, Keras (on JAX) in three variables. They are filled in when a library asks, so that
code which never asks is left alone. What the code, or ``--env``, has set stays.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ...system.instrumentation import patch, when_imported
from ...tracking.launch_log import LOGGER
from .world import JOIN_TIMEOUT_S, World, addresses, current_world

TF_CONFIG = "TF_CONFIG"
KERAS_VARIABLE = "KERAS_DISTRIBUTION_"
JAX_SHUTDOWN_TIMEOUT_S = 300
"""JAX's default."""

NO_TIMEOUT_S = 30 * 24 * 3600

EARLY_JOIN_TIMEOUT_S = 10.0
"""For variables that code reads by itself: on live ranks, some may not run the cell."""


def join_early(library: str, own: Iterable[str]) -> None:
    """Connect the ranks before a value of the library is made, which forbids it afterwards."""
    world = current_world()
    if world.size == 1 or library not in ("JAX", "TensorFlow"):
        return
    join_when_asked(world, own)
    if library == "JAX":
        importlib.import_module("jax").distributed.initialize()
    else:
        importlib.import_module("tensorflow").distribute.MultiWorkerMirroredStrategy()


def join_when_asked(world: World, own: Iterable[str]) -> None:
    """Have each library find the ranks when it asks. `own` are variables that the user gave."""
    # From the notebook's environment: what the code sets later, or --env, is the user's own.
    for name in {TF_CONFIG, *_keras_variables(world, "")}.difference(own, _set_here):
        os.environ.pop(name, None)
    resolver = "tensorflow.python.distribute.cluster_resolver.tfconfig_cluster_resolver"
    patch(resolver, "_load_tf_config", _load_tf_config)
    patch("keras.src.distribution.distribution_lib", "initialize", _initialize_keras)
    patch("jax._src.distributed:State", "initialize", _initialize_jax)
    for owner in ("jax._src.distributed", "jax.distributed"):
        patch(owner, "initialize", _initialize_jax_once)
    when_imported("jax._src.clusters.cluster", _add_cluster)


_set_here: set[str] = set()
"""The variables that were set in this process, which live ranks keep."""


def _set_variable(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = value
        _set_here.add(name)


def set_variables(world: World) -> None:
    """Set the variables for code that reads them by itself."""
    try:
        found = addresses(EARLY_JOIN_TIMEOUT_S)
    except Exception as error:  # a strategy that asks says it again
        LOGGER.info("the variables of TensorFlow and Keras were not set: %s", error)
        return
    _set_variable(TF_CONFIG, _tf_config(world, found.workers))
    _set_keras_variables(world, found.coordinator)


def _tf_config(world: World, workers: Sequence[str]) -> str:
    """Return TensorFlow's description of the cluster; rank 0 is its chief."""
    task = {"type": "worker", "index": world.rank}
    return json.dumps({"cluster": {"worker": list(workers)}, "task": task})


def _load_tf_config(original: Any) -> Any:
    world = current_world()
    if TF_CONFIG not in os.environ:
        _set_variable(TF_CONFIG, _tf_config(world, addresses().workers))
        _show_own_gpu(world.local_rank)
    return original()


def _show_own_gpu(local_rank: int) -> None:
    """Have TensorFlow use one GPU of several, as the other libraries do, if it uses none yet."""
    config: Any = sys.modules["tensorflow"].config
    gpus = config.list_physical_devices("GPU")
    if len(gpus) > 1 and config.get_visible_devices("GPU") == gpus:
        try:
            config.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")
        except RuntimeError as error:  # it has computed: it has them all
            LOGGER.info("TensorFlow keeps all GPUs: %s", error)


def _keras_variables(world: World, coordinator: str) -> dict[str, str]:
    values = {
        "JOB_ADDRESSES": coordinator,
        "NUM_PROCESSES": str(world.size),
        "PROCESS_ID": str(world.rank),
    }
    return {f"{KERAS_VARIABLE}{name}": value for name, value in values.items()}


def _set_keras_variables(world: World, coordinator: str) -> None:
    for name, value in _keras_variables(world, coordinator).items():
        _set_variable(name, value)


def _initialize_keras(original: Any, *args: Any, **kwargs: Any) -> Any:
    keras: Any = sys.modules["keras"]
    if keras.backend.backend() == "jax":
        _set_keras_variables(current_world(), _coordinator(JOIN_TIMEOUT_S))
    return original(*args, **kwargs)


def _coordinator(timeout_s: float) -> str:
    """Return the address of JAX's service. It asks nobody for a name: other hosts need not see it.

    By default it would listen to all of them.
    """
    address = addresses(timeout_s).coordinator
    if current_world().is_on_this_host:
        os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", address)
    return address


def _initialize_jax(original: Any, state: Any, *args: Any, **named: Any) -> None:
    """Let a rank that has returned wait for its peers as long as they train; JAX waits 300 s."""
    if named.get("shutdown_timeout_seconds") == JAX_SHUTDOWN_TIMEOUT_S:
        named["shutdown_timeout_seconds"] = NO_TIMEOUT_S
    original(state, *args, **named)


def _initialize_jax_once(original: Any, *args: Any, **named: Any) -> None:
    """Do nothing where the ranks are connected: by `join_early`, or by a cell on live ranks."""
    if not sys.modules["jax"].distributed.is_initialized():
        original(*args, **named)


def leave_jax() -> None:
    """Leave JAX's world when all ranks do: its service ends the process of each that is left.

    Where rank 0 returned first, the others were ended by SIGABRT (JAX 0.10).
    """
    jax: Any = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        jax.distributed.shutdown()


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
            if override_coordinator_port:  # the variable JAX_COORDINATOR_PORT
                host = addresses().coordinator.rpartition(":")[0]
                return f"{host}:{override_coordinator_port}"
            return _coordinator(float(timeout_secs or JOIN_TIMEOUT_S))

        @classmethod
        def get_process_count(cls) -> int:
            return current_world().size

        @classmethod
        def get_process_id(cls) -> int:
            return current_world().rank

        @classmethod
        def get_local_process_id(cls) -> int | None:
            return current_world().local_rank

    known.remove(NbtrainCluster)
    known.insert(0, NbtrainCluster)
