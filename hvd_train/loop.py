"""The training loop, the page to read first. A loop of your own looks like it."""

from hvd_train.loops import Epoch, Loops, Step
from hvd_train.network import freeze, optim
from hvd_train.progress.schedule import learning_rate_factor, peak_learning_rate


def train(loops: Loops) -> None:
    """Train to the last epoch. Raises Stopped if a rank was asked to stop earlier."""
    config = loops.ranks.config
    parts = loops.ranks.parts
    for epoch in loops.epochs():
        begin_epoch(loops, epoch)
        for step in epoch:
            begin_step(loops, step)
            # this rank's part; at the end of the loop all ranks have the new weights
            for micro in step:
                micro.backward(**parts.task.measure(parts.model, micro.batch))
        is_last = epoch.number == config.schedule.epochs or loops.time_is_up
        if (is_last or epoch.number % config.run.eval_epochs == 0) and parts.val_loader is not None:
            scores = loops.evaluate(parts.task, parts.evaluation, parts.val_loader, "val")
            loops.keep_best(scores.figures, parts.goal)


def begin_epoch(loops: Loops, epoch: Epoch) -> None:
    """Freeze the layers that do not train in this epoch."""
    parts = loops.ranks.parts
    freeze.apply(loops.ranks.config.model, parts.model, epoch.number - 1, parts.heads)


def begin_step(loops: Loops, step: Step) -> None:
    """Set the learning rate in the middle of the step, a function of the samples seen."""
    config = loops.ranks.config
    state = loops.ranks.state
    peak = peak_learning_rate(config.optimizer, state.layout.global_batch)
    factor = learning_rate_factor(config.schedule, step.position)
    optim.set_learning_rate(state.optimizer, peak * factor)
