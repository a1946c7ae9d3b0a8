"""transformers' Trainer with a tiny model from a configuration."""

import sys

import torch
from reporting import Stopwatch, report
from torch.distributed import is_initialized
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=64, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
)  # fmt: skip
arguments = TrainingArguments(
    output_dir=sys.argv[1], use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=2, max_steps=60,
    report_to=[], save_strategy="no", logging_steps=20, disable_tqdm=True, dataloader_num_workers=0,
)  # fmt: skip
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Texts(), eval_dataset=Texts())
assert is_initialized()
with Stopwatch() as watch:
    trainer.train()
loss = trainer.evaluate()["eval_loss"]
report([loss, *(one.detach().mean() for one in trainer.model.parameters())], watch)
