"""Lightning: one callback, which is told the module that `training_step` calls.

pip install lightning
"""

import lightning
import torch

import lowtide
from lowtide.adapters.lightning import TideCallback


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layers = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))
        self.body = torch.nn.Sequential(*layers)

    def training_step(self, batch, index):
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


callback = TideCallback(budget="2.4MiB", module="body", memory={"min_bytes": 0})
rows = torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=1024)
trainer = lightning.Trainer(
    accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False, callbacks=[callback]
)
trainer.fit(Model(), rows)
lowtide.write_report(callback.tide, "run.html")
