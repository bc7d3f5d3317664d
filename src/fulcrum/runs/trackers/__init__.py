"""Observers that send a run to TensorBoard, MLflow or Weights & Biases: `--observe tensorboard`, `mlflow`, `wandb`.

values.py       what is sent: released values and public settings, nothing else
tensorboard.py, mlflow.py, wandb.py    one tracker each; its package is imported when it is asked for

Each needs its own package (`pip install 'fulcrum-fl[track]'` brings all three).
"""

from __future__ import annotations

from fulcrum.runs.observers import OBSERVERS, Observer

__all__ = ["make_mlflow", "make_tensorboard", "make_wandb"]


@OBSERVERS.register("tensorboard")
def make_tensorboard() -> Observer:
    """Event files in the run's folder, below tensorboard/."""
    from fulcrum.runs.trackers.tensorboard import TensorBoardTracker

    return TensorBoardTracker()


@OBSERVERS.register("mlflow")
def make_mlflow() -> Observer:
    """An MLflow run at MLFLOW_TRACKING_URI, or where MLflow keeps runs by default."""
    from fulcrum.runs.trackers.mlflow import MlflowTracker

    return MlflowTracker()


@OBSERVERS.register("wandb")
def make_wandb() -> Observer:
    """A Weights & Biases run, offline unless WANDB_MODE says otherwise."""
    from fulcrum.runs.trackers.wandb import WandbTracker

    return WandbTracker()
