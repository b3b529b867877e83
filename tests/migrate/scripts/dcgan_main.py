"""DCGAN in the manner of PyTorch's example: weights by name, noise drawn in the loop, a fixed noise, checkpoints."""
import argparse
import os
import random
import tempfile

import torch
import torch.nn as nn
import torch.nn.parallel
import torch.optim as optim
import torch.utils.data

BATCH = 8
parser = argparse.ArgumentParser()
parser.add_argument('--batchSize', type=int, default=BATCH, help='input batch size')
parser.add_argument('--nz', type=int, default=4)
parser.add_argument('--niter', type=int, default=2)
parser.add_argument('--lr', type=float, default=0.002)
parser.add_argument('--cuda', action='store_true', default=False)
parser.add_argument('--dry-run', action='store_true')
parser.add_argument('--ngpu', type=int, default=1)
parser.add_argument('--outf', default=tempfile.mkdtemp())
parser.add_argument('--manualSeed', type=int, default=3)
opt = parser.parse_args([])
random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)

use_mps = False
if opt.cuda:
    device = torch.device("cuda")
elif use_mps:
    device = torch.device("mps")
else:
    device = torch.device("cpu")

dataset = torch.utils.data.TensorDataset(torch.randn(32, 3, 4, 4).tanh(), torch.zeros(32))
dataloader = torch.utils.data.DataLoader(dataset, batch_size=opt.batchSize)
ngpu = int(opt.ngpu)
nz = int(opt.nz)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find('Conv') != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.2)


class Generator(nn.Module):
    def __init__(self, ngpu):
        super(Generator, self).__init__()
        self.ngpu = ngpu
        self.main = nn.Sequential(nn.ConvTranspose2d(nz, 3, 4, 1, 0, bias=False), nn.Tanh())

    def forward(self, input):
        if input.is_cuda and self.ngpu > 1:
            output = nn.parallel.data_parallel(self.main, input, range(self.ngpu))
        else:
            output = self.main(input)
        return output


netG = Generator(ngpu).to(device)
netG.apply(weights_init)


class Discriminator(nn.Module):
    def __init__(self, ngpu):
        super(Discriminator, self).__init__()
        self.ngpu = ngpu
        self.main = nn.Sequential(nn.Conv2d(3, 1, 4, 1, 0, bias=False), nn.Sigmoid())

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


netD = Discriminator(ngpu).to(device)
netD.apply(weights_init)

criterion = nn.BCELoss()
fixed_noise = torch.randn(opt.batchSize, nz, 1, 1, device=device)
real_label = 1
fake_label = 0

optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))

for epoch in range(opt.niter):
    for i, data in enumerate(dataloader, 0):
        netD.zero_grad()
        real_cpu = data[0].to(device)
        batch_size = real_cpu.size(0)
        label = torch.full((batch_size,), real_label, dtype=real_cpu.dtype, device=device)
        output = netD(real_cpu)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(batch_size, nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        print('[%d/%d][%d/%d] Loss_D: %.6f Loss_G: %.6f D(x): %.6f'
              % (epoch, opt.niter, i, len(dataloader), errD.item(), errG.item(), D_x))
        if opt.dry_run:
            break
    fake = netG(fixed_noise)
    torch.save(netG.state_dict(), os.path.join(opt.outf, 'netG_epoch_%d.pth' % epoch))
    torch.save(netD.state_dict(), '%s/netD_epoch_%d.pth' % (opt.outf, epoch))
print('final', fake.sum().item())
