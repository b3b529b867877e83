"""An encoder and a decoder over sentences of different lengths, padded in each batch."""

import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD, BOS, EOS = 0, 1, 2
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Reversed(Dataset):
    def __init__(self, n, rng):
        self.rows = [[rng.randint(3, 12) for _ in range(rng.randint(3, 7))] for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return torch.tensor(row + [EOS]), torch.tensor([BOS, *row[::-1], EOS])


def collate_fn(batch):
    src, tgt = zip(*batch)
    return pad_sequence(src, padding_value=PAD, batch_first=True), pad_sequence(tgt, padding_value=PAD, batch_first=True)


class Seq2Seq(nn.Module):
    def __init__(self, vocab=13, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, src, tgt):
        _, hidden = self.encoder(self.embed(src))
        states, _ = self.decoder(self.embed(tgt), hidden)
        return self.out(states)


loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)


def train_epoch(model, loader, optimizer):
    model.train()
    losses = 0
    for src, tgt in loader:
        src = src.to(DEVICE)
        tgt = tgt.to(DEVICE)
        logits = model(src, tgt[:, :-1])
        optimizer.zero_grad()
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += loss.item()
    return losses / len(list(loader))


def evaluate(model, loader):
    model.eval()
    losses = 0
    with torch.no_grad():
        for src, tgt in loader:
            src = src.to(DEVICE)
            tgt = tgt.to(DEVICE)
            logits = model(src, tgt[:, :-1])
            losses += loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[:, 1:].reshape(-1)).item()
    return losses / len(list(loader))


if __name__ == "__main__":
    torch.manual_seed(0)
    rng = random.Random(0)
    train_iter, val_iter = Reversed(48, rng), Reversed(16, rng)
    train_dataloader = DataLoader(train_iter, batch_size=8, collate_fn=collate_fn)
    val_dataloader = DataLoader(val_iter, batch_size=8, collate_fn=collate_fn)
    transformer = Seq2Seq()
    for p in transformer.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    transformer = transformer.to(DEVICE)
    optimizer = torch.optim.Adam(transformer.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    for epoch in range(1, 4):
        train_loss = train_epoch(transformer, train_dataloader, optimizer)
        val_loss = evaluate(transformer, val_dataloader)
        print(f"Epoch: {epoch}, Train loss: {train_loss:.3f}, Val loss: {val_loss:.3f}")
