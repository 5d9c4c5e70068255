"""Logs finished runs to MLflow from the files in their folders, at once or later."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mecha_exp.app.reproduction.sources import SOURCES_FILE
from mecha_exp.errors import TrackingError
from mecha_exp.report import Results, write_all
from mecha_exp.report.adaptive_records import FILES as ADAPTIVE_FILES
from mecha_exp.report.conclusion import concluded_results
from mecha_exp.report.search.progress import histories_of
from mecha_exp.report.verdict import conclusion, reported_numbers
from mecha_exp.runs.files import FILES
from mecha_exp.runs.outcomes import OUTCOMES_FILE
from mecha_exp.runs.record import (
    BLOCKS_FIGURE,
    BLOCKS_FILE,
    CHANGES_FILE,
    CHECKOUT_CHANGES_FILE,
    CONFIG_FILE,
    FAILED,
    FINISHED,
    METRICS_FILE,
    RECIPE_FILE,
    RUN_FILE,
    STATISTICS_FILE,
    Record,
)
from mecha_exp.runs.sweep import FOLDER_TAG, RUNNING, Sweep, Tracking
from mecha_exp.terminal.bars import examples_bar
from mecha_exp.tracking import Store
from mecha_exp.tracking.mlflow_client import SERVER
from mecha_exp.tracking.names import NOTE_TAG, PARENT_TAG, SWEPT_TAG

ARTIFACTS = (
    RUN_FILE,
    METRICS_FILE,
    OUTCOMES_FILE,
    CHANGES_FILE,
    CHECKOUT_CHANGES_FILE,
    SOURCES_FILE,
    CONFIG_FILE,
    RECIPE_FILE,
    BLOCKS_FILE,
    BLOCKS_FIGURE,
    STATISTICS_FILE,
    "mecha_exp.log",
)
HYDRA_ARTIFACTS = ("config.yaml", "overrides.yaml")
VERDICT_TAG = "verdict"
"""The tag of a sweep's run with the sentence of its verdict."""
MODEL_TAG, SHA256_TAG = "model/path", "model/sha256"
"""The tags of a run with the path of its model, or of the input, and with the SHA-256 of its content."""
GROUP_SECONDS = 1
"""How long the points of a sweep wait for others, to be logged together."""
GROUP = 100
"""How many runs a transaction holds at most: other processes wait for its end."""
SENT = 32
"""How many runs are sent to a server at a time, while others come."""


@dataclass(frozen=True)
class EndedRun:
    """A run that is to be logged.

    Attributes:
        folder: its folder.
        record: its record, which learns the id that MLflow gives to it.
        parent: the id of the sweep's run.
        replaces: the id of the run that was in the folder before.
    """

    folder: Path
    record: Record
    parent: str | None = None
    replaces: str | None = None


class Tracker:
    """Logs the points of a sweep while it runs: at once, or those of a second together.

    A transaction for each point costs more processor time than all else of tracking. A server takes long for
    each run, so it gets some runs at a time, beside the work of the sweep. What is not logged when the
    process is killed or interrupted is logged when the same command goes on.

    Args:
        tracking: the store and the experiment.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._waiting: list[EndedRun] = []
        self._logged_at = float("-inf")
        self._thread = ThreadPoolExecutor(1, "tracking")
        self._sent: Future[None] | None = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if self._sent is not None:
            self._sent.result()
            if error is not None and issubclass(error, KeyboardInterrupt):
                return  # the others may take minutes
        self.flush()

    def add(self, run: EndedRun) -> None:
        """Log a run, now or together with the next ones. Its record tells whether that failed."""
        self._waiting.append(run)
        if str(self._tracking.uri).startswith(SERVER):
            self._send()
        elif time.monotonic() - self._logged_at >= GROUP_SECONDS:
            self.flush()

    def _send(self) -> None:
        """Send some of the runs that wait to a server, unless it still has others to do."""
        if self._sent is None or self._sent.done():
            sent, self._waiting = self._waiting[:SENT], self._waiting[SENT:]
            self._sent = self._thread.submit(self._log, sent)

    def flush(self) -> None:
        """Log the runs that wait."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            with examples_bar("logging to MLflow", len(waiting)) as advance:
                self._log(waiting, advance)

    def _log(self, runs: Sequence[EndedRun], advance: Callable[[int], None] = lambda count: None) -> None:
        try:
            log_runs(runs, Store(str(self._tracking.uri), self._tracking.experiment), advance)
        except TrackingError as error:
            for run in runs:
                if run.record.run_id is None:
                    run.record.tracking_error = str(error)
                    run.record.save_run(run.folder)
        self._logged_at = time.monotonic()


def log_runs(
    runs: Sequence[EndedRun], store: Store, advance: Callable[[int], None] = lambda count: None
) -> None:
    """Log runs and write their ids into their records.

    Many go into one transaction where the store has them. A server has none, and each run takes a dozen
    requests: there several are logged at a time.

    Args:
        runs: those of a sweep, or a single one.
        store: gets them.
        advance: told how many more are logged.

    Raises:
        TrackingError: the store does not answer or cannot be used.
    """
    if any(run.parent is None for run in runs):
        store.delete_abandoned()
    size = GROUP if store.has_transactions else 1
    newest = next((run.record for run in reversed(runs) if run.record.metric), None)
    groups = [runs[start : start + size] for start in range(0, len(runs), size)]
    mains = [newest, *[None] * len(groups)]  # the first group names the main metric
    if store.writers == 1:
        for group, main in zip(groups, mains, strict=False):
            _log_group(group, store, main)
            advance(len(group))
        return
    with ThreadPoolExecutor(store.writers) as pool:
        logged = [
            pool.submit(_log_group, group, store, main) for group, main in zip(groups, mains, strict=False)
        ]
        try:
            for one, group in zip(logged, groups, strict=True):
                one.result()
                advance(len(group))
        finally:
            for one in logged:
                one.cancel()


def _log_group(group: Sequence[EndedRun], store: Store, main: Record | None) -> None:
    """Log runs in one transaction, and with them the main metric of a record."""
    with store.transaction():
        if main is not None:
            store.name_main_metric(str(main.metric), more_is_better=main.direction == "maximize")
        ids = [log_folder(run.folder, run.record, store, run.parent) for run in group]
        for run in group:
            if run.replaces and store.status(run.replaces) is not None:
                store.delete(run.replaces)
    for run, run_id in zip(group, ids, strict=True):
        run.record.run_id, run.record.tracking_error = run_id, None
        run.record.save_run(run.folder)


def log_folder(folder: Path, record: Record, store: Store, parent: str | None = None) -> str:
    """Log one run; returns its MLflow id."""
    files = [folder / name for name in ARTIFACTS]
    files += [folder / ".hydra" / name for name in HYDRA_ARTIFACTS]
    files += [folder / FILES]
    return store.log(
        record.name,
        record.status,
        (record.started, record.ended),
        record.parameters,
        _main_first(record.metric, record.metrics),
        {
            **source_tags(record),
            **record.tags,
            **({"error": record.error} if record.error else {}),
            **({"dropped": record.dropped_where} if record.dropped is not None else {}),
            **({MODEL_TAG: record.model} if record.model else {}),
            **({SHA256_TAG: record.model_sha256} if record.model_sha256 else {}),
        },
        files,
        parent,
        datasets_of(record, record.metrics),
    )


def source_tags(record: Record) -> dict[str, str]:
    """The tags that fill MLflow's column of sources: the program, and the commit that it ran from."""
    commit = record.tags.get("git/commit")
    tags = {"mlflow.source.name": "python -m mecha_exp", "mlflow.source.type": "LOCAL"}
    return {**tags, **({"mlflow.source.git.commit": commit} if commit else {})}


def _main_first(metric: str | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with the main one before the others, as MLflow lists them."""
    return dict(sorted(metrics.items(), key=lambda item: item[0] != metric))


def datasets_of(record: Record, metrics: Mapping[str, float]) -> dict[tuple[str, str], str]:
    """The digest of each evaluation that gave some of the metrics, by the evaluator's name and the split."""
    splits = {record.split, record.report_split} - {None}
    named: dict[tuple[str, str], str] = {}
    for prefix, key in {**record.evaluations, **record.reported}.items():
        if not any(name.startswith(prefix) for name in metrics):
            continue
        name, _, digest = key.rpartition("-")
        split = next((s for s in splits if prefix.startswith(f"{s}/")), record.split or "all")
        named[name, str(split)] = digest
    return named


def log_sweep(folder: Path, store: Store) -> int:
    """Log what a store lacks of a sweep; returns the number of points that were logged."""
    sweep = Sweep.load(folder)
    mend_parent(sweep, folder, store)
    mend_points(sweep, folder, store)
    is_new = sweep.parent_run is None
    if is_new:
        tags = {"command": " ".join(sweep.command), FOLDER_TAG: str(folder.absolute())}
        sweep.parent_run = store.start(sweep.title, tags)
    sweep.tracking_error = None
    sweep.save(folder)
    missing = log_missing(sweep, sweep.records(folder), store)
    if missing or store.status(str(sweep.parent_run)) == RUNNING:
        results = concluded_results(sweep, folder)
        written = write_all(results, sweep.command, folder)
        written += filter(Path.is_file, map(folder.joinpath, (*ADAPTIVE_FILES, OUTCOMES_FILE)))
        close_run(sweep, results, folder, written, store)
        sweep.save(folder)
    return missing


def log_missing(sweep: Sweep, records: Mapping[Path, Record], store: Store) -> int:
    """Log the points that are not in a store; returns how many.

    They were there before the sweep was tracked, or the store did not answer then.
    """
    missing = [(path, record) for path, record in records.items() if record.run_id is None]
    with examples_bar("logging to MLflow", len(missing)) as advance:
        log_runs([EndedRun(path, record, sweep.parent_run) for path, record in missing], store, advance)
    return len(missing)


def log_run(folder: Path, record: Record, store: Store) -> bool:
    """Log a run that is not part of a sweep, unless the store has it; returns whether it was logged."""
    if record.run_id is not None and store.status(record.run_id) is not None:
        return False
    log_runs([EndedRun(folder, record)], store)
    return True


def mend_parent(sweep: Sweep, folder: Path, store: Store) -> None:
    """Remove the runs that a killed start opened for a sweep; forget its own run if the store lacks it."""
    parents = store.runs_with(FOLDER_TAG, str(folder.absolute()))
    for run_id, status in parents.items():
        if run_id != sweep.parent_run and status == RUNNING:
            store.delete(run_id)
    if sweep.parent_run not in parents:  # another store, or deleted there
        sweep.parent_run = None


def mend_points(sweep: Sweep, folder: Path, store: Store) -> None:
    """Remove the runs of points that a kill left half logged; forget those that the store lacks.

    A server sends everything about the runs when it is asked which there are, which takes its time.
    """
    records = sweep.records(folder)
    logged = {record.run_id for record in records.values()} | set(sweep.input_runs.values())
    children = store.runs_with(PARENT_TAG, sweep.parent_run) if sweep.parent_run else {}
    for run_id in children.keys() - logged:
        store.delete(run_id)
    sweep.input_runs = {name: run for name, run in sweep.input_runs.items() if run in children}
    for path, record in records.items():
        if record.run_id is not None and record.run_id not in children:
            record.run_id = None
            record.save(path)


def close_run(sweep: Sweep, results: Results, folder: Path, files: Sequence[Path], store: Store) -> None:
    """Log the best point, the verdict and the result files of a sweep, and end its MLflow run."""
    best = results.best
    metrics = {f"best/{best.metric}": best.metrics[str(best.metric)]} if best else {}
    metrics |= reported_numbers(results)
    recipes = dict.fromkeys(str(r.parameters["recipe"]) for r in results.records if "recipe" in r.parameters)
    tags = {SWEPT_TAG: ", ".join(sweep.swept), "recipe": ", ".join(recipes)}
    if results.records:
        tags |= source_tags(results.records[0])
    tags |= {"best": best.name} if best else {}
    if said := conclusion(results):
        tags |= {VERDICT_TAG: said[0], NOTE_TAG: "\n\n".join(said)}
    _log_inputs(sweep, results, store)
    failed = any(record.status == FAILED for record in results.records)
    status = FAILED if failed or sweep.underway else FINISHED
    began = min((record.started for record in results.records), default=0)
    histories = histories_of(results, folder)
    store.finish(str(sweep.parent_run), status, metrics, tags, files, histories, began)


def _log_inputs(sweep: Sweep, results: Results, store: Store) -> None:
    """Log the inputs as runs of the sweep, beside which its points are compared.

    Their source and datasets are those of the points.
    """
    for name in sweep.input_runs.keys() - results.references.keys():
        store.delete(sweep.input_runs.pop(name))
    times = (min((r.started for r in results.records), default=0),) * 2
    for name, metrics in results.references.items():
        measured = [record for record in results.records if name in record.references]
        datasets = {key: of for record in measured for key, of in datasets_of(record, metrics).items()}
        if name in sweep.input_runs:
            store.add(sweep.input_runs[name], metrics, [], datasets)
        else:
            tags = {**source_tags(measured[0]), "role": "input", **_file_tags(measured[0], name)}
            numbers, parent = _main_first(results.metric, metrics), str(sweep.parent_run)
            sweep.input_runs[name] = store.log(name, FINISHED, times, {}, numbers, tags, [], parent, datasets)


def _file_tags(record: Record, name: str) -> dict[str, str]:
    """The tags with the path of an input and the hash of its content, as far as a point knows them."""
    known = {MODEL_TAG: record.inputs.get(name), SHA256_TAG: record.tags.get(f"fingerprint/{name}")}
    return {tag: str(value) for tag, value in known.items() if value}


def how_to_log_later(folder: Path) -> str:
    """A hint with the command that logs a folder when the store answers again."""
    return f"The results are kept in {folder}. Log them later with: python -m mecha_exp track {folder}"
