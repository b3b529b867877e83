// Memory of the devices, and pinned memory of the host.
//
// Each device has one range of addresses that nobody may touch (PROT_NONE), which tensors point into, and a second one of
// the same size with the bytes. What reads a tensor's address on the host without a copy ends with SIGSEGV.
#include "runtime.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace sim {

namespace {

constexpr size_t kReserved = size_t(8) << 30; // of addresses, per device; pages are taken when they are first written
constexpr size_t kAlignment = 512;
constexpr int64_t kAnyStream = -1;

struct Block {
  size_t size = 0;
  int64_t stream = kAnyStream; // whose work is done with it in order
  std::vector<std::shared_ptr<Event>> uses; // of other streams, after which it may be used again
};

struct Memory {
  std::mutex mutex;
  char* hidden = nullptr; // what tensors see
  char* bytes = nullptr; // what kernels see
  size_t limit = size_t(1) << 30;
  std::map<size_t, Block> free, taken; // by offset
  std::map<size_t, std::set<int64_t>> recorded; // streams that use a block beside its own
  size_t allocated = 0, peak = 0, num_ooms = 0;

  void reserve() {
    if (hidden) return;
    hidden = static_cast<char*>(mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    bytes = static_cast<char*>(
        mmap(nullptr, kReserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    TORCH_CHECK(hidden != MAP_FAILED && bytes != MAP_FAILED, "sim: no addresses left");
    free[0] = Block{limit, kAnyStream, {}};
  }

  // The smallest free block of at least `size` bytes that `stream` may use; free.end() where there is none.
  std::map<size_t, Block>::iterator find(size_t size, int64_t stream) {
    auto best = free.end();
    for (auto it = free.begin(); it != free.end(); ++it) {
      Block& block = it->second;
      if (block.size < size || (block.stream != stream && block.stream != kAnyStream)) continue;
      if (!std::all_of(block.uses.begin(), block.uses.end(), is_done)) continue;
      const bool is_better = best == free.end() || (block.stream == stream && best->second.stream != stream) ||
          (block.stream == best->second.stream && block.size < best->second.size);
      if (is_better) best = it;
    }
    return best;
  }

  // Make one block of neighbours that any stream may use; called when all streams are done.
  void merge() {
    for (auto& [offset, block] : free) {
      block.stream = kAnyStream;
      block.uses.clear();
    }
    for (auto it = free.begin(); it != free.end();) {
      auto next = std::next(it);
      if (next != free.end() && it->first + it->second.size == next->first) {
        it->second.size += next->second.size;
        free.erase(next);
      } else {
        it = next;
      }
    }
  }
};

Memory& memory_of(c10::DeviceIndex index) {
  static auto* all = new std::array<Memory, 16>();
  return (*all)[index];
}

void release(void* pointer) {
  if (!pointer || was_forked()) return;
  const auto index = device_of(pointer);
  Memory& memory = memory_of(index);
  std::set<int64_t> others;
  const size_t offset = static_cast<char*>(pointer) - memory.hidden;
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    if (auto found = memory.recorded.find(offset); found != memory.recorded.end()) {
      others = std::move(found->second);
      memory.recorded.erase(found);
    }
  }
  std::vector<std::shared_ptr<Event>> uses;
  for (auto number : others)
    uses.push_back(record(c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), number)));
  std::lock_guard<std::mutex> lock(memory.mutex);
  auto node = memory.taken.extract(offset);
  TORCH_INTERNAL_ASSERT(!node.empty());
  memory.allocated -= node.mapped().size;
  node.mapped().uses = std::move(uses);
  memory.free.insert(std::move(node));
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    check_not_forked();
    const auto index = current_device();
    const c10::Device device(kSim, index);
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    const size_t size = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    const auto stream = current_stream(index);
    Memory& memory = memory_of(index);
    std::unique_lock<std::mutex> lock(memory.mutex);
    memory.reserve();
    auto found = memory.find(size, stream.id());
    if (found == memory.free.end()) {
      lock.unlock();
      finish_device(index);
      lock.lock();
      memory.merge();
      found = memory.find(size, stream.id());
    }
    if (found == memory.free.end()) {
      ++memory.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", size / 1048576.0, " MiB. Device ",
          int(index), " has a total capacity of ", memory.limit / 1048576.0, " MiB of which ",
          (memory.limit - memory.allocated) / 1048576.0, " MiB is free.");
    }
    const size_t offset = found->first;
    auto node = memory.free.extract(found);
    if (node.mapped().size > size) {
      memory.free[offset + size] = Block{node.mapped().size - size, node.mapped().stream, {}};
      node.mapped().size = size;
    }
    node.mapped().stream = stream.id();
    node.mapped().uses.clear();
    memory.taken.insert(std::move(node));
    memory.allocated += size;
    memory.peak = std::max(memory.peak, memory.allocated);
    char* hidden = memory.hidden + offset;
    char* bytes = memory.bytes + offset;
    lock.unlock();
    forget_writes(hidden);
    // NaN, until somebody writes: what reads a buffer before its copy is done finds that.
    auto fill = [bytes, size] { std::memset(bytes, 0xFF, size); };
    if (is_idle(stream)) {
      fill();
    } else {
      enqueue(stream, fill);
    }
    return {hidden, hidden, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(device_view(to), device_view(from), count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    const auto index = current_device();
    finish_device(index);
    Memory& memory = memory_of(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.merge();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    Memory& memory = memory_of(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto& bytes = stats.allocated_bytes[0];
    bytes.current = int64_t(memory.allocated);
    bytes.peak = int64_t(memory.peak);
    stats.reserved_bytes[0] = bytes;
    stats.active_bytes[0] = bytes;
    stats.num_ooms = int64_t(memory.num_ooms);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Memory& memory = memory_of(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.peak = memory.allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Memory& memory = memory_of(index);
    std::lock_guard<std::mutex> lock(memory.mutex);
    return {memory.limit - memory.allocated, memory.limit};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

// -- pinned memory

std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned_blocks() {
  static auto* blocks = new std::map<const char*, size_t>();
  return *blocks;
}

void release_pinned(void* pointer) {
  if (!pointer) return;
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks().erase(static_cast<char*>(pointer));
  }
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 64, std::max<size_t>(num_bytes, 64)) == 0, "no memory");
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks()[static_cast<char*>(pointer)] = std::max<size_t>(num_bytes, 1);
    return {pointer, pointer, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

PinnedAllocator pinned_allocator;

// -- generators: each device has one; its numbers are those of torch's CPU generator

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}
  at::Generator inner;

  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static auto* all = new std::vector<at::Generator>();
    if (index < 0) index = current_device();
    while (all->size() <= size_t(index)) all->push_back(at::make_generator<Generator>(c10::DeviceIndex(all->size())));
    return (*all)[index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device() : index);
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return c10::Device(kSim, device_of(pointer));
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {
    check_not_forked();
  }
  c10::DeviceIndex deviceCount() const override {
    return c10::DeviceIndex(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device();
    if (index >= 0) set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto data = allocator.allocate(num_bytes);
    if (data.get() && storage.data())
      std::memcpy(device_view(data.get()), device_view(storage.data()), std::min(num_bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

struct RegisterHooks {
  RegisterHooks() {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} register_hooks;

} // namespace

at::Generator& inner_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

c10::DeviceIndex device_of(const void* pointer) {
  for (int index = 0; index < 16; ++index) {
    const char* start = memory_of(c10::DeviceIndex(index)).hidden;
    if (start && pointer >= start && pointer < start + kReserved) return c10::DeviceIndex(index);
  }
  TORCH_CHECK(false, "no address of a sim device: ", pointer);
}

void* device_view(const void* pointer) {
  if (!pointer) return nullptr;
  Memory& memory = memory_of(device_of(pointer));
  return memory.bytes + (static_cast<const char*>(pointer) - memory.hidden);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto& blocks = pinned_blocks();
  auto after = blocks.upper_bound(static_cast<const char*>(pointer));
  if (after == blocks.begin()) return false;
  auto block = std::prev(after);
  return static_cast<const char*>(pointer) < block->first + block->second;
}

void set_memory_limit(c10::DeviceIndex index, size_t num_bytes) {
  num_bytes = num_bytes / kAlignment * kAlignment;
  TORCH_CHECK(num_bytes <= kReserved, "sim: at most ", kReserved, " bytes a device");
  finish_device(index);
  Memory& memory = memory_of(index);
  std::lock_guard<std::mutex> lock(memory.mutex);
  if (memory.hidden) {
    memory.merge();
    TORCH_CHECK(!memory.free.empty() || num_bytes >= memory.limit, "sim: memory is in use");
    if (num_bytes >= memory.limit) {
      memory.free[memory.limit] = Block{num_bytes - memory.limit, kAnyStream, {}};
      memory.merge();
    } else {
      auto last = std::prev(memory.free.end());
      TORCH_CHECK(
          last->first + last->second.size == memory.limit && last->first <= num_bytes,
          "sim: a tensor lies beyond the new limit");
      if (last->first == num_bytes) memory.free.erase(last);
      else last->second.size = num_bytes - last->first;
    }
  }
  memory.limit = num_bytes;
}

void record_stream(const void* pointer, c10::Stream stream) {
  if (!pointer) return;
  Memory& memory = memory_of(device_of(pointer));
  std::lock_guard<std::mutex> lock(memory.mutex);
  const size_t offset = static_cast<const char*>(pointer) - memory.hidden;
  auto block = memory.taken.find(offset);
  if (block != memory.taken.end() && block->second.stream != stream.id()) memory.recorded[offset].insert(stream.id());
}

void Allocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  record_stream(data.get(), stream);
}

} // namespace sim
