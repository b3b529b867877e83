// Tensors of the device as tensors of the CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

bool is_sim(const at::Tensor& tensor);
// A CPU tensor over the same bytes, which keeps them alive; tensors of other devices as they are.
at::Tensor on_host(const at::Tensor& tensor);

} // namespace sim
