"""A small language model trained with DeepSpeed, as its tutorials do it. Knows nothing of distmon.

deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds_config.json
"""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import Dataset

TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog, who is not lazy at all, "
    "jumps over the quick brown fox; both of them go on for as long as anybody looks. "
)


class CharDataset(Dataset):
    """Windows of a short text, repeated."""

    def __init__(self, block_size, length=4096):
        vocabulary = sorted(set(TEXT))
        self.vocab_size = len(vocabulary)
        codes = [vocabulary.index(c) for c in TEXT * 8]
        self.data = torch.tensor(codes)
        self.block_size = block_size
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        begin = (index * 13) % (len(self.data) - self.block_size - 1)
        chunk = self.data[begin : begin + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class TinyTransformer(nn.Module):
    def __init__(self, vocab_size, block_size, width=64, layers=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab_size)
        mask = torch.triu(torch.full((block_size, block_size), float("-inf")), diagonal=1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, inputs):
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.tokens(inputs) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask.to(hidden.dtype))
        return self.head(hidden)


def get_args():
    parser = argparse.ArgumentParser(description="DeepSpeed example")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--log-interval", type=int, default=10)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(1234)

    dataset = CharDataset(block_size=32)
    net = TinyTransformer(dataset.vocab_size, dataset.block_size)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=dataset
    )
    criterion = nn.CrossEntropyLoss()

    step = 0
    for _ in range(args.epochs):
        for inputs, targets in trainloader:
            inputs = inputs.to(model_engine.device)
            targets = targets.to(model_engine.device)

            logits = model_engine(inputs)
            loss = criterion(logits.float().flatten(0, 1), targets.flatten())
            model_engine.backward(loss)
            model_engine.step()

            step += 1
            if step % args.log_interval == 0 and torch.distributed.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step == args.max_steps:
                return


if __name__ == "__main__":
    main()
