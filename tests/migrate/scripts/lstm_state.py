"""Truncated backpropagation: the hidden state is carried over from one piece of the text to the next."""

import torch
import torch.nn as nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1111)
batch_size, bptt, clip, lr = 4, 5, 0.25, 1.0


class RNNModel(nn.Module):
    def __init__(self, ntoken, dim):
        super().__init__()
        self.dim = dim
        self.encoder = nn.Embedding(ntoken, dim)
        self.rnn = nn.LSTM(dim, dim)
        self.decoder = nn.Linear(dim, ntoken)

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output).view(-1, self.decoder.out_features), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, self.dim), weight.new_zeros(1, bsz, self.dim)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


train_data = batchify(torch.arange(200) * 5 % 11, batch_size)
model = RNNModel(11, 8).to(device)
criterion = nn.CrossEntropyLoss()

for epoch in range(1, 3):
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(batch_size)
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
    print(f"| epoch {epoch} | loss {total_loss:.4f}")
