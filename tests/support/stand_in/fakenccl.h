// "fakenccl", a stand-in for NCCL: collectives of tensors on "fakegpu", by Gloo on the same memory.
//
// As NCCL it refuses tensors of CPUs, has an average that multiplies by 1/N before it adds, and no host stop is told.
// Unlike NCCL its wait() keeps the host until the collective is done. device.cpp includes this file: the compiler then
// reads PyTorch's headers once.
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

using c10d::Work;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
template <typename T>
using Pointer = c10::intrusive_ptr<T>;

Tensor checked_on_host(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1, "No backend type associated with device type ",
              tensor.device().type());  // PyTorch's words where a group has NCCL alone
  return on_host(tensor);
}

Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (const Tensor& each : tensors) found.push_back(checked_on_host(each));
  return found;
}

Lists on_host(const Lists& lists) {
  Lists found;
  for (const Tensors& each : lists) found.push_back(on_host(each));
  return found;
}

struct FakeNCCL final : c10d::Backend {
  Pointer<c10d::Backend> gloo;

  explicit FakeNCCL(Pointer<c10d::Backend> given)
      : c10d::Backend(given->getRank(), given->getSize()), gloo(std::move(given)) {}

  const std::string getBackendName() const override { return "fakenccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }

  template <typename Options>
  Options summed(Tensors& tensors, Options options) {
    if (options.reduceOp == c10d::ReduceOp::AVG) {
      for (Tensor& each : tensors) each.is_floating_point() ? each.mul_(1.0 / getSize()) : each;
      options.reduceOp = c10d::ReduceOp::SUM;
    }
    return options;
  }

  Pointer<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return gloo->broadcast(host, options);
  }
  Pointer<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = on_host(tensors);
    return gloo->allreduce(host, summed(host, options));
  }
  Pointer<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = on_host(tensors);
    return gloo->allreduce_coalesced(host, summed(host, options));
  }
  Pointer<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = on_host(tensors);
    return gloo->reduce(host, summed(host, options));
  }
  Pointer<Work> allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo->allgather(to, from, options);
  }
  Pointer<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensor to = on_host(output), from = on_host(input);
    return gloo->_allgather_base(to, from, options);
  }
  Pointer<Work> gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo->gather(to, from, options);
  }
  Pointer<Work> scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo->scatter(to, from, options);
  }
  Pointer<Work> reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo->reduce_scatter(to, from, options);
  }
  Pointer<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                     const c10d::ReduceScatterOptions& options) override {
    Tensor to = on_host(output), from = on_host(input);
    return gloo->_reduce_scatter_base(to, from, options);
  }
  Pointer<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                              std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    Tensor to = on_host(output), from = on_host(input);
    return gloo->alltoall_base(to, from, output_sizes, input_sizes, options);
  }
  Pointer<Work> send(Tensors& tensors, int to, int tag) override {
    auto host = on_host(tensors);
    return gloo->send(host, to, tag);
  }
  Pointer<Work> recv(Tensors& tensors, int from, int tag) override {
    auto host = on_host(tensors);
    return gloo->recv(host, from, tag);
  }
  Pointer<Work> barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
};

}  // namespace

void define_fakenccl(pybind11::module& module) {
  pybind11::module::import("torch.distributed");
  pybind11::class_<FakeNCCL, Pointer<FakeNCCL>, c10d::Backend>(module, "FakeNCCL")
      .def(pybind11::init([](const Pointer<c10d::Backend>& gloo) { return c10::make_intrusive<FakeNCCL>(gloo); }));
}
