"""What each service kept of a run, read back by the service's own reader.

A reader returns the settings of the run, if the service keeps them offline, and step -> loss.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = "digits"
Kept = tuple[dict[str, Any] | None, dict[int, float]]


def tensorboard(folder: Path) -> Kept:
    """TensorBoard's event accumulator; the hyper-parameters are in the folder beside."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [settings] = (folder / PROJECT).glob("*/hparams.yml")
    events = EventAccumulator(str(folder / PROJECT))
    events.Reload()
    assert "digits" in events.Tags()["images"]
    import yaml

    return yaml.safe_load(settings.read_text()), {each.step: each.value for each in events.Scalars("train_loss")}


def wandb(folder: Path) -> Kept:
    """W&B's own records; its reader of the file around them is a program, so SwanLab's reader of W&B files opens it."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    [file] = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    reader, settings, losses = WBDataStoreReader(), {}, {}
    reader.open(file)
    pictures = 0
    while (data := reader.scan()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "config":
            settings.update({each.key: json.loads(each.value_json) for each in record.config.update})
        if record.WhichOneof("record_type") == "history":
            row = {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
            losses[row["_step"]] = row["train_loss"]
            pictures += row.get("digits/count", 0)
    assert pictures == 2
    return settings, losses


def mlflow(folder: Path) -> Kept:
    """MLflow's client on the SQLite file; values are text."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name(PROJECT)
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train_loss")
    kinds = {"learning_rate": float, "batch_size": int, "model": str}
    settings = {key: kinds[key](value) for key, value in run.data.params.items()}
    return settings, {each.step: each.value for each in history}


def aim(folder: Path) -> Kept:
    """Aim's repository, opened for writing: Aim 3.29 finds nothing in a run that it opens read-only."""
    from aim import Repo, Run
    from aim.storage.context import Context

    [name] = Repo(str(folder)).list_all_runs()
    run = Run(run_hash=name, repo=str(folder), read_only=False, system_tracking_interval=None)
    assert run.name == PROJECT and run.get_image_sequence("digits", Context({})) is not None
    [loss] = [metric for metric in run.metrics() if metric.name == "train_loss"]
    table = loss.dataframe()
    return run["hparams"], dict(zip(table["step"].astype(int), table["value"], strict=True))


def comet_ml(folder: Path) -> Kept:
    """`comet offline`, Comet's reader of its offline archives."""
    [archive] = (folder / "comet").glob("*.zip")
    program = Path(sys.executable).with_name("comet")
    text = subprocess.run(
        [program, "offline", "--csv", "--level", "detail", archive], capture_output=True, text=True, check=True
    ).stdout
    rows = [row for row in csv.DictReader(text.splitlines()) if row["project"] == PROJECT]
    del rows  # the programs prints one value a metric; the steps are in the archive's messages
    import zipfile

    losses, settings = {}, {}
    for line in zipfile.ZipFile(archive).read("messages.json").decode().splitlines():
        message = json.loads(line)
        if message["type"] == "metric_msg" and message["payload"]["metric"]["metricName"] == "train_loss":
            metric = message["payload"]["metric"]
            losses[metric["step"]] = float(metric["metricValue"])
        if message["type"] == "parameter_msg":
            settings[message["payload"]["param"]["paramName"]] = message["payload"]["param"]["paramValue"]
    return settings, losses


def clearml(folder: Path) -> Kept:
    """The offline session, in the form that `Task.import_offline_session` sends to a server."""
    [session] = (folder / "clearml" / "offline").glob("offline-*/")
    events = [event for line in (session / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)]
    assert any(event["type"] == "training_debug_image" for event in events)
    losses = {
        event["iter"]: event["value"]
        for event in events
        if event["type"] == "training_stats_scalar" and (event["metric"], event["variant"]) == ("loss", "train")
    }
    return None, losses


def dvclive(folder: Path) -> Kept:
    """DVCLive's reader of the plots that it wrote."""
    from types import SimpleNamespace

    from dvclive.utils import parse_metrics
    from ruamel.yaml import YAML

    here = folder / "dvclive"
    live = SimpleNamespace(plots_dir=str(here / "plots"), metrics_file=str(here / "metrics.json"))
    plots, _last = parse_metrics(live)
    [rows] = [rows for path, rows in plots.items() if path.endswith("train_loss.tsv")]
    settings = YAML(typ="safe").load((here / "params.yaml").read_text())
    return settings, {int(row["step"]): float(row["train_loss"]) for row in rows}


def swanlab(folder: Path) -> Kept:
    """SwanLab's reader of the file that it would upload."""
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    [file] = folder.glob("swanlab/run-*/*.swanlab")
    reader, losses = DataStoreReader(), {}
    reader.open(file)
    for data in reader:
        record = record_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("scalar") and record.scalar.key == "train_loss":
            losses[record.scalar.step] = record.scalar.value.number
    assert len(list(file.parent.glob("media/image/*.png"))) == 2
    import yaml

    settings = yaml.safe_load((file.parent / "files" / "config.yaml").read_text())
    return {key: value["value"] for key, value in settings.items()}, losses


def trackio(folder: Path) -> Kept:
    """Trackio's reader of its SQLite file."""
    from trackio.sqlite_storage import SQLiteStorage

    [run] = SQLiteStorage.get_runs(PROJECT)
    settings = SQLiteStorage.get_run_config(PROJECT, run)
    losses = {each["step"]: each["train_loss"] for each in SQLiteStorage.get_logs(PROJECT, run) if "train_loss" in each}
    return settings, losses


READERS: dict[str, Callable[[Path], Kept]] = {
    reader.__name__: reader
    for reader in (tensorboard, wandb, mlflow, aim, comet_ml, clearml, dvclive, swanlab, trackio)
}


if __name__ == "__main__":  # in a process of its own, whose environment says where the service's files are
    settings, losses = READERS[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({"settings": settings, "losses": sorted(losses.items())}))
