"""pytorch-ignite: its distributed module, an engine, and metrics."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import Accuracy, Loss
from reporting import Stopwatch, report


def main():
    torch.manual_seed(0)
    net = idist.auto_model(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    )
    optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=0.1))
    maker = torch.Generator().manual_seed(idist.get_rank())
    batches = [
        (torch.randn(8, 32, generator=maker), torch.randint(4, (8,), generator=maker)) for _ in range(100)
    ]
    criterion = torch.nn.CrossEntropyLoss()

    def step(engine, batch):
        optimizer.zero_grad()
        loss = criterion(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    def judge(engine, batch):
        with torch.no_grad():
            return net(batch[0]), batch[1]

    trainer, evaluator = Engine(step), Engine(judge)
    Accuracy().attach(evaluator, "accuracy")
    Loss(criterion).attach(evaluator, "loss")
    trainer.on(Events.EPOCH_COMPLETED)(lambda: evaluator.run(batches))
    with Stopwatch() as watch:
        trainer.run(batches, max_epochs=3)
    everyone = idist.all_gather(float(trainer.state.output))
    report([*evaluator.state.metrics.values(), *torch.as_tensor(everyone).tolist()], watch)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(lambda _: main())
