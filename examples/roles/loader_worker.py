"""A worker of the trainer's DataLoader waits for a file lock, which the tokenizer process holds while it waits for input."""

import fcntl
import os
import sys
import tempfile
import time

import torch
from job import main, ready, start, tell, train


class Texts(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == 16:
            ready()
        with open(f"{self.folder}/lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if index >= 16 else fcntl.LOCK_UN)
            return torch.tensor(index)


def tokenizer(folder):
    read, _write = os.pipe()
    with open(f"{folder}/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        open(f"{folder}/held", "w").close()
        print(os.read(read, 1), file=sys.stderr)  # <- here


def trainer():
    tell("trainer")
    folder = tempfile.mkdtemp()
    start(tokenizer, folder)
    while not os.path.exists(f"{folder}/held"):
        time.sleep(0.05)
    for _ in torch.utils.data.DataLoader(Texts(folder), batch_size=4, num_workers=2):
        train()


main(trainer, tokenizer)
