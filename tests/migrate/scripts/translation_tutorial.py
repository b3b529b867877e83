"""An encoder and a decoder with an optimizer each, in the manner of the translation tutorial."""
import random

import torch
import torch.nn as nn
from torch import optim
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

BATCH = 8
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(10)
MAX_LENGTH = 4


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super(EncoderRNN, self).__init__()
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def forward(self, input):
        return self.gru(self.embedding(input))


class DecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size):
        super(DecoderRNN, self).__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        batch_size = encoder_outputs.size(0)
        decoder_input = torch.empty(batch_size, 1, dtype=torch.long, device=device).fill_(0)
        decoder_hidden = encoder_hidden
        decoder_outputs = []
        for i in range(MAX_LENGTH):
            decoder_output, decoder_hidden = self.forward_step(decoder_input, decoder_hidden)
            decoder_outputs.append(decoder_output)
            if target_tensor is not None:
                decoder_input = target_tensor[:, i].unsqueeze(1)
            else:
                decoder_input = decoder_output.argmax(-1).detach()
        return torch.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1), decoder_hidden, None

    def forward_step(self, input, hidden):
        output, hidden = self.gru(torch.relu(self.embedding(input)), hidden)
        return self.out(output), hidden


def get_dataloader(batch_size):
    ids = torch.randint(0, 10, (64, MAX_LENGTH))
    train_data = TensorDataset(ids.to(device), ids.flip(1).to(device))
    train_sampler = SequentialSampler(train_data)
    return ids, DataLoader(train_data, sampler=train_sampler, batch_size=batch_size)


def train_epoch(dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion):
    total_loss = 0
    for data in dataloader:
        input_tensor, target_tensor = data
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        decoder_outputs, _, _ = decoder(encoder_outputs, encoder_hidden, target_tensor)
        loss = criterion(decoder_outputs.view(-1, decoder_outputs.size(-1)), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        total_loss += loss.item()
    return total_loss / len(dataloader)


def train(train_dataloader, encoder, decoder, n_epochs, learning_rate=0.01, print_every=1):
    print_loss_total = 0
    encoder_optimizer = optim.Adam(encoder.parameters(), lr=learning_rate)
    decoder_optimizer = optim.Adam(decoder.parameters(), lr=learning_rate)
    criterion = nn.NLLLoss()
    for epoch in range(1, n_epochs + 1):
        loss = train_epoch(train_dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion)
        print_loss_total += loss
        if epoch % print_every == 0:
            print('%d %.6f' % (epoch, print_loss_total / print_every))
            print_loss_total = 0


def evaluate(encoder, decoder, ids):
    with torch.no_grad():
        encoder_outputs, encoder_hidden = encoder(ids[:4].to(device))
        decoder_outputs, decoder_hidden, _ = decoder(encoder_outputs, encoder_hidden)
        return decoder_outputs.sum().item()


ids, train_dataloader = get_dataloader(BATCH)
encoder = EncoderRNN(10, 8).to(device)
decoder = DecoderRNN(8, 10).to(device)
train(train_dataloader, encoder, decoder, 3)
encoder.eval()
decoder.eval()
print('final', evaluate(encoder, decoder, ids))
