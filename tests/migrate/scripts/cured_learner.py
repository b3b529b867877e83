"""learner, cured: the loaders are passed to the loop by their names."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Callback:
    def before_fit(self, learn): pass
    def after_batch(self, learn): pass
    def after_epoch(self, learn): pass


class Recorder(Callback):
    def before_fit(self, learn):
        self.losses = []

    def after_batch(self, learn):
        if learn.training:
            self.losses.append(learn.loss.item())

    def after_epoch(self, learn):
        print("final", learn.epoch, learn.valid_loss)


class Learner:
    def __init__(self, model, loss_func, lr, cbs, opt_func=torch.optim.SGD):
        self.model = model
        self.loss_func = loss_func
        self.lr = lr
        self.cbs = cbs
        self.opt_func = opt_func
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def callback(self, name):
        for cb in self.cbs:
            getattr(cb, name)(self)

    def one_batch(self, xb, yb):
        self.xb, self.yb = xb.to(self.device), yb.to(self.device)
        self.preds = self.model(self.xb)
        self.loss = self.loss_func(self.preds, self.yb)
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()
        self.callback("after_batch")

    def one_epoch(self, training, dl):
        self.training = training
        self.model.train(training)
        total, count = 0.0, 0
        for xb, yb in dl:
            self.one_batch(xb, yb)
            total += self.loss.item() * len(xb)
            count += len(xb)
        if not training:
            self.valid_loss = total / count

    def fit(self, n_epochs, train_dl, valid_dl):
        self.model.to(self.device)
        self.opt = self.opt_func(self.model.parameters(), lr=self.lr)
        self.callback("before_fit")
        for self.epoch in range(n_epochs):
            self.one_epoch(True, train_dl)
            with torch.no_grad():
                self.one_epoch(False, valid_dl)
            self.callback("after_epoch")


torch.manual_seed(4)
x = torch.randn(84, 6)
y = x.sum(1, keepdim=True)
train_dl = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=BATCH)
valid_dl = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=BATCH * 2)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
learn = Learner(model, nn.MSELoss(), 0.05, [Recorder()])
learn.fit(2, train_dl, valid_dl)
