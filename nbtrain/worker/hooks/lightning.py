"""Lightning: its epochs, and what it logs; seen in 2.0 to 2.6."""

from __future__ import annotations

from typing import Any

from ...system.instrumentation import patch
from .observer import notify

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def watch_logs() -> None:
    """Notify of logged values."""
    for package in _PACKAGES:
        connector = f"{package}.trainer.connectors.logger_connector.logger_connector"
        patch(f"{connector}:_LoggerConnector", "log_metrics", _log_metrics)


def _log_metrics(original: Any, connector: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(connector, metrics, *args, **kwargs)
    if metrics and not connector.trainer.sanity_checking:  # without a logger it comes here, too
        notify.on_log(metrics, int(connector.trainer.global_step))
    return result


def watch_fitting() -> None:
    """Notify of epochs."""
    for package in _PACKAGES:
        patch(f"{package}.loops.fit_loop:_FitLoop", "advance", _advance)


def _advance(original: Any, fit_loop: Any) -> Any:
    notify.on_lightning_epoch(fit_loop)
    return original(fit_loop)
