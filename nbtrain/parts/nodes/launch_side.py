"""Starts the ranks of a launch on several nodes by the engine for them."""

from __future__ import annotations

from ...part_api import Engine, LaunchSide, Plan, PlanError, check_allowed


class NodesLaunch(LaunchSide):
    """Replaces the engine of a plan with a rendezvous; imports nothing for any other plan."""

    def check(self, plan: Plan) -> None:
        """Refuse a launch on several nodes that restarts, or where the host forbids them."""
        if plan.rendezvous is None:
            return
        check_allowed("num_nodes", "`num_nodes`")
        if plan.max_restarts:
            raise PlanError(
                "max_restarts works on one node only. Save checkpoints, and after a failure run "
                "the cell again on every node"
            )

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        """Return the engine that joins the other nodes.

        Raises `PlanError` if the plan names another engine than 'fork', or the host has a TPU.
        """
        if plan.rendezvous is None:
            return engine
        if engine.device or plan.engine not in ("auto", "fork"):
            raise PlanError(
                f"several nodes (num_nodes) cannot use the {engine.name} engine: use num_nodes=1"
            )
        from .engine import MultinodeEngine

        return MultinodeEngine()
