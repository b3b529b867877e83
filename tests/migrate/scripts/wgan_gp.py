"""A Wasserstein GAN with a gradient penalty: gradients of gradients, five critic steps, noise in the loop."""
import torch
import torch.autograd as autograd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor
torch.manual_seed(13)
generator = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))
discriminator = nn.Sequential(nn.Linear(2, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
if cuda:
    generator.cuda()
    discriminator.cuda()
dataloader = DataLoader(TensorDataset(torch.randn(40, 2)), batch_size=8, shuffle=False)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))


def compute_gradient_penalty(D, real_samples, fake_samples):
    alpha = torch.rand(real_samples.size(0), 1, device=real_samples.device)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = D(interpolates)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


batches_done = 0
for epoch in range(2):
    for i, (imgs,) in enumerate(dataloader):
        real_imgs = imgs.cuda() if cuda else imgs
        optimizer_D.zero_grad()
        z = torch.randn(imgs.shape[0], 4, device=real_imgs.device)
        fake_imgs = generator(z)
        real_validity = discriminator(real_imgs)
        fake_validity = discriminator(fake_imgs.detach())
        gradient_penalty = compute_gradient_penalty(discriminator, real_imgs.data, fake_imgs.data)
        d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + 10 * gradient_penalty
        d_loss.backward()
        optimizer_D.step()
        optimizer_G.zero_grad()
        if i % 2 == 0:
            g_loss = -torch.mean(discriminator(generator(z)))
            g_loss.backward()
            optimizer_G.step()
            print("final [Epoch %d] [Batch %d] %.6f %.6f" % (epoch, i, d_loss.item(), g_loss.item()))
