// A process group for the device: gloo, on the device's bytes.
#include "operators.h"
#include "runtime.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

namespace sim {

void observe_synchronizations(PyObject* callable); // streams.cpp

namespace {

using Tensors = std::vector<at::Tensor>;
using c10d::Work;
template <typename T>
using Pointer = c10::intrusive_ptr<T>;

Tensors on_host(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(sim::on_host(tensor));
  return views;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  for (const auto& list : lists) views.push_back(on_host(list));
  return views;
}

// The work of gloo, with the results on the device.
struct SimWork final : Work {
  SimWork(Pointer<Work> work, Tensors results) : work_(std::move(work)), results_(std::move(results)) {}
  bool isCompleted() override {
    return work_->isCompleted();
  }
  bool isSuccess() const override {
    return work_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return work_->exception();
  }
  int sourceRank() const override {
    return work_->sourceRank();
  }
  Tensors result() override {
    return results_;
  }
  void synchronize() override {
    work_->wait();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return work_->wait(timeout);
  }
  void abort() override {
    work_->abort();
  }
  Pointer<c10::ivalue::Future> getFuture() override {
    auto results = results_;
    return work_->getFuture()->then(
        [results](c10::ivalue::Future& done) {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          return c10::IValue(results);
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  Pointer<Work> work_;
  Tensors results_;
};

class SimBackend final : public c10d::Backend {
 public:
  explicit SimBackend(Pointer<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "simccl";
  }
  Pointer<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(tensors, tensors, [&](Tensors& views) { return gloo_->broadcast(views, options); });
  }
  Pointer<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(tensors, tensors, [&](Tensors& views) { return gloo_->allreduce(views, options); });
  }
  Pointer<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return run(tensors, tensors, [&](Tensors& views) { return gloo_->allreduce_coalesced(views, options); });
  }
  Pointer<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(tensors, tensors, [&](Tensors& views) { return gloo_->reduce(views, options); });
  }
  Pointer<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(inputs, flat(outputs), [&](Tensors& views) {
      auto targets = on_host(outputs);
      return gloo_->allgather(targets, views, options);
    });
  }
  Pointer<Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run({input}, {output}, [&](Tensors& views) {
      auto target = sim::on_host(output);
      return gloo_->_allgather_base(target, views[0], options);
    });
  }
  Pointer<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(inputs, outputs, [&](Tensors& views) {
      auto targets = on_host(outputs);
      return gloo_->allgather_into_tensor_coalesced(targets, views, options);
    });
  }
  Pointer<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return run(inputs, flat(outputs), [&](Tensors& views) {
      auto targets = on_host(outputs);
      return gloo_->gather(targets, views, options);
    });
  }
  Pointer<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return run(outputs, outputs, [&](Tensors& views) {
      auto sources = on_host(inputs);
      return gloo_->scatter(views, sources, options);
    });
  }
  Pointer<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return run(outputs, outputs, [&](Tensors& views) {
      auto sources = on_host(inputs);
      return gloo_->reduce_scatter(views, sources, options);
    });
  }
  Pointer<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return run({input}, {output}, [&](Tensors& views) {
      auto target = sim::on_host(output);
      return gloo_->_reduce_scatter_base(target, views[0], options);
    });
  }
  Pointer<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return run(inputs, outputs, [&](Tensors& views) {
      auto targets = on_host(outputs);
      return gloo_->reduce_scatter_tensor_coalesced(targets, views, options);
    });
  }
  Pointer<Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return run({input}, {output}, [&](Tensors& views) {
      auto target = sim::on_host(output);
      return gloo_->alltoall_base(target, views[0], output_sizes, input_sizes, options);
    });
  }
  Pointer<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return run(inputs, outputs, [&](Tensors& views) {
      auto targets = on_host(outputs);
      return gloo_->alltoall(targets, views, options);
    });
  }
  Pointer<Work> send(Tensors& tensors, int rank, int tag) override {
    return run(tensors, tensors, [&](Tensors& views) { return gloo_->send(views, rank, tag); });
  }
  Pointer<Work> recv(Tensors& tensors, int rank, int tag) override {
    return run(tensors, tensors, [&](Tensors& views) { return gloo_->recv(views, rank, tag); });
  }
  Pointer<Work> recvAnysource(Tensors& tensors, int tag) override {
    return run(tensors, tensors, [&](Tensors& views) { return gloo_->recvAnysource(views, tag); });
  }
  Pointer<Work> barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override {
    gloo_->monitoredBarrier(options, wait_all);
  }
  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void abort() override {
    gloo_->abort();
  }
  void shutdown() override {
    gloo_->shutdown();
  }

 private:
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }
  template <typename Function>
  Pointer<Work> run(const Tensors& tensors, const Tensors& results, Function call) {
    for (const auto& tensor : tensors)
      if (is_sim(tensor)) finish(current_stream(tensor.device().index()));
    auto views = on_host(tensors);
    return c10::make_intrusive<SimWork>(call(views), results);
  }

  Pointer<c10d::Backend> gloo_;
};

Pointer<c10d::Backend> make_backend(const Pointer<c10d::Backend>& gloo) {
  return c10::make_intrusive<SimBackend>(gloo);
}

} // namespace

PYBIND11_MODULE(_sim, m) {
  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("current_device", &current_device);
  m.def("set_device", [](int index) { set_current_device(c10::DeviceIndex(index)); });
  m.def("was_forked", &was_forked);
  m.def("allow_after_fork", &allow_after_fork);
  m.def("observe_synchronizations", [](py::object callable) { observe_synchronizations(callable.ptr()); });
  m.def("was_used", &was_used);
  m.def("initialize", &check_not_forked);
  m.def("set_memory_limit", [](int index, size_t num_bytes) { set_memory_limit(c10::DeviceIndex(index), num_bytes); });
  m.def("set_copy_delay", &set_copy_delay);
  m.def("check_order", &check_order);
  m.def("unordered_reads", &unordered_reads);
  m.def("make_backend", &make_backend);
  m.def("default_generator", [](int index) {
    return at::globalContext().defaultGenerator(c10::Device(kSim, c10::DeviceIndex(index)));
  });
  m.def("counters", [] {
    auto& c = counters();
    return std::map<std::string, int64_t>{
        {"kernels", c.kernels}, {"host_to_device", c.host_to_device}, {"device_to_host", c.device_to_host},
        {"device_to_device", c.device_to_device}, {"asynchronous_copies", c.asynchronous_copies},
        {"synchronizations", c.synchronizations}, {"scalars_read", c.scalars_read}};
  });
}

} // namespace sim
