"""Neural transfer: the picture is what is optimized, the network isn't."""
import torch
import torch.nn as nn
import torch.optim as optim

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_default_device(device)
torch.manual_seed(0)
cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
content_img = torch.rand(1, 3, 8, 8)
target = cnn(content_img).detach()


def get_input_optimizer(input_img):
    optimizer = optim.LBFGS([input_img])
    return optimizer


def run_style_transfer(cnn, input_img, num_steps=4):
    input_img.requires_grad_(True)
    cnn.requires_grad_(False)
    optimizer = get_input_optimizer(input_img)
    run = [0]
    while run[0] <= num_steps:
        def closure():
            with torch.no_grad():
                input_img.clamp_(0, 1)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(cnn(input_img), target)
            loss.backward()
            run[0] += 1
            return loss
        optimizer.step(closure)
    return input_img


output = run_style_transfer(cnn, torch.rand(1, 3, 8, 8))
print("final", output.sum().item())
