// Devices, streams and events.
#include "runtime.h"

#include <Python.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace sim {

Counters& counters() {
  static Counters counted;
  return counted;
}

namespace {
PyObject* observer = nullptr; // a callable of a test
}

void note_synchronization() {
  ++counters().synchronizations;
  if (!observer) return;
  const auto state = PyGILState_Ensure();
  Py_XDECREF(PyObject_CallNoArgs(observer));
  PyGILState_Release(state);
}
void observe_synchronizations(PyObject* callable) {
  Py_XINCREF(callable);
  Py_XDECREF(observer);
  observer = callable == Py_None ? nullptr : callable;
}

// -- devices

namespace {
std::atomic<int> num_devices{1};
std::atomic<bool> used{false}, forked{false};
thread_local c10::DeviceIndex device_now = 0;
std::atomic<int64_t> copy_microseconds{300};

void forget_threads() {
  if (used) forked = true;
}
} // namespace

int device_count() {
  return num_devices;
}
void set_device_count(int count) {
  num_devices = count;
}
c10::DeviceIndex current_device() {
  return device_now;
}
void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "sim:", int(index), " doesn't exist: ", device_count(), " devices");
  device_now = index;
}
bool was_forked() {
  return forked;
}
bool was_used() {
  return used;
}
void check_not_forked() {
  if (!used.exchange(true)) pthread_atfork(nullptr, nullptr, forget_threads);
  TORCH_CHECK(!forked, "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, you must use the 'spawn' start method");
}

// -- streams

using Clock = std::map<int64_t, int64_t>; // by stream, how much of its work is known to be done

struct Event {
  Clock clock;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point time;
};

namespace {

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  int64_t num_enqueued = 0, num_done = 0;
  bool has_thread = false;

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return !work.empty(); });
      {
        auto next = std::move(work.front());
        work.pop_front();
        lock.unlock();
        next();
      } // what the work holds is freed before it counts as done
      lock.lock();
      ++num_done;
      changed.notify_all();
    }
  }
};

std::mutex queues_mutex;
// Queues live as long as the process: their threads never end.
std::vector<std::vector<Queue*>>& queues() {
  static auto* all = new std::vector<std::vector<Queue*>>();
  return *all;
}

Queue& queue_of(c10::Stream stream) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  auto& all = queues();
  const size_t device = stream.device_index(), number = stream.id();
  if (all.size() <= device) all.resize(device + 1);
  while (all[device].size() <= number) all[device].push_back(new Queue());
  return *all[device][number];
}

std::vector<c10::Stream>& streams_now() {
  thread_local std::vector<c10::Stream> streams;
  while (streams.size() < size_t(device_count()))
    streams.emplace_back(c10::Stream::UNSAFE, c10::Device(kSim, c10::DeviceIndex(streams.size())), 0);
  return streams;
}

// Runs `wait` without Python's lock: what a stream frees may be an object of Python's.
template <typename Function>
void without_python(Function wait) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    wait();
    PyEval_RestoreThread(state);
  } else {
    wait();
  }
}

} // namespace

// Threads don't survive a fork: queues start again, and memory is a copy of the parent's.
void allow_after_fork() {
  queues().clear();
  forked = false;
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return streams_now()[index < 0 ? current_device() : index];
}

c10::Stream new_stream(c10::DeviceIndex index) {
  if (index < 0) index = current_device();
  static std::atomic<int64_t> number{0};
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), ++number);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto& now = streams_now()[stream.device_index()];
  std::swap(now, stream);
  return stream;
}

void enqueue(c10::Stream stream, std::function<void()> work) {
  check_not_forked();
  Queue& queue = queue_of(stream);
  std::lock_guard<std::mutex> lock(queue.mutex);
  if (!queue.has_thread) {
    queue.has_thread = true;
    std::thread([&queue] { queue.run(); }).detach();
  }
  queue.work.push_back(std::move(work));
  ++queue.num_enqueued;
  queue.changed.notify_all();
}

bool is_idle(c10::Stream stream) {
  Queue& queue = queue_of(stream);
  std::lock_guard<std::mutex> lock(queue.mutex);
  return queue.num_done == queue.num_enqueued;
}

void finish(c10::Stream stream) {
  if (is_idle(stream)) return;
  without_python([&] {
    Queue& queue = queue_of(stream);
    std::unique_lock<std::mutex> lock(queue.mutex);
    const int64_t last = queue.num_enqueued;
    queue.changed.wait(lock, [&] { return queue.num_done >= last; });
  });
}

void finish_device(c10::DeviceIndex index) {
  size_t count = 0;
  {
    std::lock_guard<std::mutex> lock(queues_mutex);
    if (queues().size() > size_t(index)) count = queues()[index].size();
  }
  for (size_t number = 0; number < count; ++number) {
    const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kSim, index), int64_t(number));
    finish(stream);
    note_host_waited(stream);
  }
}

// -- order

namespace {
std::atomic<bool> is_order_checked{false};
std::mutex order_mutex;
std::map<int64_t, Clock> clocks;
Clock host_clock;
std::map<const void*, std::pair<int64_t, int64_t>> last_writes; // by memory: the stream, and its clock
std::vector<std::string> found_unordered;

int64_t name_of(c10::Stream stream) {
  return (int64_t(stream.device_index()) << 32) | int64_t(stream.id());
}
void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, count] : from) into[stream] = std::max(into[stream], count);
}
// The clock of a stream whose next work is queued now, after all that the host has waited for.
Clock& clock_now(c10::Stream stream) {
  Clock& clock = clocks[name_of(stream)];
  merge(clock, host_clock);
  return clock;
}
} // namespace

void check_order(bool enabled) {
  std::lock_guard<std::mutex> lock(order_mutex);
  is_order_checked = enabled;
  if (!enabled) return;
  found_unordered.clear();
  last_writes.clear();
}
std::vector<std::string> unordered_reads() {
  std::lock_guard<std::mutex> lock(order_mutex);
  return found_unordered;
}
void note_write(c10::Stream stream, const void* memory) {
  if (!is_order_checked || !memory) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  last_writes[memory] = {name_of(stream), ++clock_now(stream)[name_of(stream)]};
}
void note_read(c10::Stream stream, const void* memory, const std::string& reader) {
  if (!is_order_checked || !memory) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  const auto found = last_writes.find(memory);
  if (found == last_writes.end() || found->second.first == name_of(stream)) return;
  const auto [writer, count] = found->second;
  if (clock_now(stream)[writer] >= count) return;
  found_unordered.push_back(
      reader + " on stream " + std::to_string(stream.id()) + " reads what stream " +
      std::to_string(writer & 0xFFFFFFFF) + " wrote, and nothing waits for that");
}
void forget_writes(const void* memory) {
  if (!is_order_checked) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  last_writes.erase(memory);
}
void note_host_waited(c10::Stream stream) {
  if (!is_order_checked) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  merge(host_clock, clock_now(stream));
}

// -- events

std::shared_ptr<Event> record(c10::Stream stream) {
  auto event = std::make_shared<Event>();
  if (is_order_checked) {
    std::lock_guard<std::mutex> lock(order_mutex);
    event->clock = clock_now(stream);
  }
  auto mark = [event] {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->done = true;
    event->time = std::chrono::steady_clock::now();
    event->changed.notify_all();
  };
  if (is_idle(stream)) {
    mark();
  } else {
    enqueue(stream, mark);
  }
  return event;
}

namespace {
void note_event_passed(const std::shared_ptr<Event>& event) {
  if (!is_order_checked) return;
  std::lock_guard<std::mutex> lock(order_mutex);
  merge(host_clock, event->clock);
}
} // namespace

bool is_done(const std::shared_ptr<Event>& event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->done;
}

void wait(const std::shared_ptr<Event>& event) {
  if (is_done(event)) return;
  without_python([&] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->done; });
  });
}

void block(c10::Stream stream, const std::shared_ptr<Event>& event) {
  if (is_order_checked) {
    std::lock_guard<std::mutex> lock(order_mutex);
    merge(clock_now(stream), event->clock);
  }
  if (is_done(event)) return;
  enqueue(stream, [event] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->done; });
  });
}

double seconds_between(const std::shared_ptr<Event>& first, const std::shared_ptr<Event>& second) {
  TORCH_CHECK(is_done(first) && is_done(second), "Both events must be completed before calculating elapsed time.");
  return std::chrono::duration<double>(second->time - first->time).count();
}

void set_copy_delay(int64_t microseconds) {
  copy_microseconds = microseconds;
}
void wait_for_copy() {
  std::this_thread::sleep_for(std::chrono::microseconds(copy_microseconds));
}

// -- what torch asks of a device

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (device.index() >= 0) set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kSim, current_device());
  }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current_device() : device.index();
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<std::shared_ptr<Event>*>(*event);
    *event = new std::shared_ptr<Event>(sim::record(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) sim::block(stream, *static_cast<std::shared_ptr<Event>*>(event));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    const auto& recorded = *static_cast<std::shared_ptr<Event>*>(event);
    const bool done = is_done(recorded);
    if (done) note_event_passed(recorded);
    return done;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return c10::DeviceIndex(device_count());
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_synchronization();
    finish(stream);
    note_host_waited(stream);
  }
  void synchronizeEvent(void* event) const override {
    note_synchronization();
    if (!event) return;
    wait(*static_cast<std::shared_ptr<Event>*>(event));
    note_event_passed(*static_cast<std::shared_ptr<Event>*>(event));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    note_synchronization();
    finish_device(index < 0 ? current_device() : index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return 1000 *
        seconds_between(*static_cast<std::shared_ptr<Event>*>(first), *static_cast<std::shared_ptr<Event>*>(second));
  }
};

} // namespace

void record_stream(const void* pointer, c10::Stream stream); // memory.cpp

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  record_stream(data.get(), stream);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace sim
