// The runtime of the imitated accelerator: memory that the host can't touch, devices, streams and events.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;

// What a run did, to be counted by tests: copies by direction, and waits of the host for a device.
struct Counters {
  std::atomic<int64_t> kernels{0}, host_to_device{0}, device_to_host{0}, device_to_device{0}, asynchronous_copies{0},
      synchronizations{0}, scalars_read{0};
};
Counters& counters();
void note_synchronization();

// -- devices

int device_count();
void set_device_count(int count);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
// Raises in a process that was forked after its parent had used a device.
void check_not_forked();
bool was_forked();
// Let a fork of a process that has used a device use it too, which no real device does.
void allow_after_fork();
bool was_used();

// -- memory

// The address at which the device itself reads and writes what lies at `pointer`, an address that the host can't touch.
void* device_view(const void* pointer);
c10::DeviceIndex device_of(const void* pointer);
void set_memory_limit(c10::DeviceIndex index, size_t num_bytes);
bool is_pinned(const void* pointer);

// -- streams: each is a queue of work with a thread of its own

c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream new_stream(c10::DeviceIndex index);
c10::Stream exchange_stream(c10::Stream stream);
void enqueue(c10::Stream stream, std::function<void()> work);
bool is_idle(c10::Stream stream);
// Wait until the work queued so far is done, without Python's lock.
void finish(c10::Stream stream);
void finish_device(c10::DeviceIndex index);

struct Event;
std::shared_ptr<Event> record(c10::Stream stream);
bool is_done(const std::shared_ptr<Event>& event);
void wait(const std::shared_ptr<Event>& event);
void block(c10::Stream stream, const std::shared_ptr<Event>& event);
double seconds_between(const std::shared_ptr<Event>& first, const std::shared_ptr<Event>& second);

// -- order: whether a read is known to come after the write of what it reads, by events and waits (vector clocks)

void check_order(bool enabled); // from now on; forgets what was found
std::vector<std::string> unordered_reads();
void note_write(c10::Stream stream, const void* memory);
void note_read(c10::Stream stream, const void* memory, const std::string& reader);
void forget_writes(const void* memory); // it is new
void note_host_waited(c10::Stream stream);

// How long an asynchronous copy takes, so that a missing synchronisation shows.
void set_copy_delay(int64_t microseconds);
void wait_for_copy();

} // namespace sim
