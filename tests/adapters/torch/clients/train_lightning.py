"""Lightning's DDPStrategy, with a metric of integers that it averages over the ranks."""

import logging
import sys
import warnings

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from reporting import BACKEND, Stopwatch, report

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
            torch.nn.Linear(128, 8),
        )  # fmt: skip

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        self.log("right", (self.layers(batch[0]).argmax(1) == batch[1]).sum(), on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Watching(lightning.Callback):
    def on_train_start(self, trainer, module):
        self.watch = Stopwatch().__enter__()

    def on_train_end(self, trainer, module):
        self.watch.__exit__()


maker = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(1024, 32, generator=maker), torch.randint(8, (1024,), generator=maker)
)
watching, net = Watching(), Net()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=BACKEND), max_epochs=4,
    callbacks=[watching], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=sys.argv[1],
)  # fmt: skip
trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=16))
metrics = [trainer.callback_metrics[name] for name in ("loss_epoch", "right_epoch")]
report([*metrics, *(one.detach().mean() for one in net.parameters())], watching.watch)
