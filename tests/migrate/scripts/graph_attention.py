"""A graph network in the manner of PyTorch's GAT and GCN examples: one graph, no loader, early stopping."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim):
        super(GraphConv, self).__init__()
        self.kernel = nn.Parameter(torch.Tensor(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, input_tensor, adj_mat):
        return torch.mm(adj_mat, torch.mm(input_tensor, self.kernel))


class GCN(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim):
        super(GCN, self).__init__()
        self.gc1 = GraphConv(input_dim, hidden_dim)
        self.gc2 = GraphConv(hidden_dim, output_dim)

    def forward(self, input_tensor, adj_mat):
        x = F.relu(self.gc1(input_tensor, adj_mat))
        return F.log_softmax(self.gc2(x, adj_mat), dim=1)


def load_graph(device='cpu'):
    features = torch.randn(20, 6).to(device)
    labels = (features.sum(1) > 0).long().to(device)
    adj_mat = torch.eye(20) + torch.diag(torch.ones(19), 1)
    adj_mat = adj_mat / adj_mat.sum(1, keepdim=True)
    return features, labels, adj_mat.to(device)


def train_iter(epoch, model, optimizer, criterion, input, target, mask_train, mask_val, print_every=2):
    model.train()
    optimizer.zero_grad()
    output = model(*input)
    loss = criterion(output[mask_train], target[mask_train])
    loss.backward()
    optimizer.step()
    loss_train, acc_train = test(model, criterion, input, target, mask_train)
    loss_val, acc_val = test(model, criterion, input, target, mask_val)
    if epoch % print_every == 0:
        print(f'Epoch: {epoch:04d} loss_train: {loss_train:.4f} acc_train: {acc_train:.4f} loss_val: {loss_val:.4f}')


def test(model, criterion, input, target, mask):
    model.eval()
    with torch.no_grad():
        output = model(*input)
        output, target = output[mask], target[mask]
        loss = criterion(output, target)
        acc = (output.argmax(dim=1) == target).float().sum() / len(target)
    return loss.item(), acc.item()


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='PyTorch Graph Convolutional Network')
    parser.add_argument('--epochs', type=int, default=6)
    parser.add_argument('--no-cuda', action='store_true', default=True)
    parser.add_argument('--seed', type=int, default=42)
    args = parser.parse_args([])
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    torch.manual_seed(args.seed)
    if use_cuda:
        device = torch.device('cuda')
    else:
        device = torch.device('cpu')
    features, labels, adj_mat = load_graph(device=device)
    idx = torch.randperm(len(labels)).to(device)
    idx_test, idx_val, idx_train = idx[:5], idx[5:10], idx[10:]
    gcn = GCN(features.shape[1], 8, 2).to(device)
    optimizer = Adam(gcn.parameters(), lr=0.05, weight_decay=5e-4)
    criterion = nn.NLLLoss()
    for epoch in range(args.epochs):
        train_iter(epoch + 1, gcn, optimizer, criterion, (features, adj_mat), labels, idx_train, idx_val)
    loss_test, acc_test = test(gcn, criterion, (features, adj_mat), labels, idx_test)
    print(f'final {loss_test:.6f} {acc_test:.4f}')
