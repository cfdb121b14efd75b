// A stand-in accelerator: two devices in main memory whose streams queue their work, for tests of code that orders streams.
//
// Computation runs at once, by torch's CPU kernels on the same memory, after everything its own stream was told to wait
// for. Copies between pinned host memory and a device are queued, and run when a wait forces them or the adversary feels
// like it. Nothing orders two streams but record and wait; the host learns of what is complete by query and synchronize.
//
// The order is checked too: each stream has a vector clock, each byte range remembers who wrote and read it last, and
// allocation and free count as writes by the stream that owns the block. An access that is not ordered after the ones
// before it is listed as a violation, whatever the bytes were, and what it makes is poison.
//
// Not modelled: driver errors, graph capture, peer access, pools other than one per stream, the numbers of GPU kernels.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::DispatchKey;

constexpr int kNumDevices = 2;
constexpr int kStreamsPerDevice = 33;  // the default one, and a pool that is handed out in turn, as CUDA's
constexpr int kNumStreams = kNumDevices * kStreamsPerDevice;
constexpr size_t kAlign = 512;
constexpr int kPoison = 0xFF;  // NaN in every float format, -1 in every integer
constexpr int kPatience = 40;  // so many queries of one event may find it incomplete
constexpr size_t kMaxViolations = 200;

// -- clocks ----------------------------------------------------------------------------------------------------------

// For each stream, how many of its accesses are known to be complete (or, of a stream's own clock, issued before).
struct Clock : std::array<uint64_t, kNumStreams> {
  Clock() { fill(0); }
  void join(const Clock& other) {
    for (int i = 0; i < kNumStreams; ++i) (*this)[i] = std::max((*this)[i], other[i]);
  }
  bool covers(const Clock& other) const {
    for (int i = 0; i < kNumStreams; ++i)
      if ((*this)[i] < other[i]) return false;
    return true;
  }
};

// One recording of an event. A wait holds on to the recording, so that recording the event again changes nothing.
struct Point {
  int stream = 0;
  uint64_t position = 0;
  Clock clock;
  double time = 0;
  bool is_done = false;
  int num_queries = 0;
};
using PointPtr = std::shared_ptr<Point>;

struct Work {
  enum Kind { kWait, kMark, kCopy, kPoisonBlock } kind;
  PointPtr point;
  char* to = nullptr;
  const char* from = nullptr;
  size_t nbytes = 0;
  bool is_racing = false;
  std::shared_ptr<void> pinned;  // host memory lives until the copy ran; device memory does not
};

struct Queue {
  std::deque<Work> works;
  uint64_t num_submitted = 0, num_done = 0;
  Clock clock;
  double now = 0;
};

enum Policy { kLate = 0, kEarly = 1, kRandom = 2, kClock = 3, kHidden = 4 };

// Rates in bytes and operations a second; the least that an operator and that a copy takes; and the share of a copy's
// time by which computation beside it falls behind.
struct Speeds {
  double out = 20e9, in = 20e9, memory = 1e12, flops = 1e14, launch = 1e-6, latency = 0, share = 0;
};

struct Span {
  int stream;
  double start, end;
};

// -- who touched which bytes -------------------------------------------------------------------------------------------

struct Segment {
  uintptr_t end = 0;
  int writer = -1;
  uint64_t written_at = 0;
  const char* what = "";
  std::vector<std::pair<int, uint64_t>> reads;
};

struct Block {
  char* data;
  size_t nbytes;  // rounded
  int device, stream;
  std::set<int> other_streams;
  int64_t life = -1;  // its number among those that somebody watches
};

// Of a block, from when it was given out to when it came back, in moments (each allocation and each free is one).
struct Life {
  size_t nbytes;
  int64_t born, dies;
  const char* what;  // wrote to it last
};

struct State {
  std::recursive_mutex mutex;
  std::array<Queue, kNumStreams> queues;
  std::array<int, kNumDevices> next_stream{};
  Clock host;
  double host_now = 0;
  Policy policy = kLate;
  double chance = 0.5;
  std::mt19937_64 random{0};
  Speeds speeds;
  bool is_running = false;

  std::map<uintptr_t, Segment> shadow;
  std::vector<std::string> violations;
  uint64_t num_violations = 0;
  std::set<std::string> names;  // of operators, to point at

  std::array<size_t, kNumDevices> cap;
  std::array<int64_t, kNumDevices> own_peak{};  // nobody but the tests can reset it
  std::array<c10::CachingDeviceAllocator::DeviceStats, kNumDevices> stats;
  std::map<std::pair<int, size_t>, std::vector<Block*>> free_blocks;
  std::array<std::vector<Span>, kNumDevices> copies;  // when they run, as long as computation may still meet them
  int64_t num_allocations = 0, fail_from = -1, fail_until = -1;
  void (*watcher)(int64_t) = nullptr;  // called for each block that is given out, with the number of its life
  std::vector<Life> lives;
  int64_t moment = 0;
  std::map<uintptr_t, std::weak_ptr<void>> pinned;
  std::map<uintptr_t, size_t> pinned_bytes;
  std::array<at::Generator, kNumDevices> generators;
  uint64_t num_copies = 0, num_recorded_early = 0;
  bool has_statistics = true;

  State() {
    cap.fill(SIZE_MAX);
    for (auto& generator : generators) generator = at::make_generator<at::CPUGeneratorImpl>(0);
  }
};

State& state() {
  static State* made = new State;  // never destroyed: tensors may die after it
  return *made;
}

// The interpreter's lock: this library is loaded into a process that has it.
extern "C" int PyGILState_Check(void);
extern "C" void* PyEval_SaveThread(void);
extern "C" void PyEval_RestoreThread(void*);

// Holds the mutex. Nobody waits for it with the interpreter's lock in hand, so whoever has the mutex may ask for that:
// a kernel that is written in Python does, and so does the death of a tensor that Python has seen.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    if (PyGILState_Check()) python_ = PyEval_SaveThread();
    mutex_.lock();
  }
  ~Lock() {
    mutex_.unlock();
    if (python_ != nullptr) PyEval_RestoreThread(python_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::recursive_mutex& mutex_;
  void* python_ = nullptr;
};

thread_local int current_device = 0;
// How often a thread went over to each device: by all threads, and by this one.
std::array<std::atomic<uint64_t>, kNumDevices> num_entered{};
thread_local std::array<uint64_t, kNumDevices> num_entered_here{};
thread_local std::array<int, kNumDevices> current_streams = {0, kStreamsPerDevice};

int device_of(int stream) { return stream / kStreamsPerDevice; }
Queue& queue_of(int stream) { return state().queues[stream]; }

// -- running queued work -----------------------------------------------------------------------------------------------

void force(int stream, uint64_t position);

void run_front(int stream) {
  Queue& queue = queue_of(stream);
  Work& front = queue.works.front();
  if (front.kind == Work::kWait && !front.point->is_done) {
    PointPtr point = front.point;
    force(point->stream, point->position);
  }
  Work work = std::move(queue.works.front());
  queue.works.pop_front();
  ++queue.num_done;
  switch (work.kind) {
    case Work::kWait: break;
    case Work::kMark: work.point->is_done = true; break;
    case Work::kCopy:
      if (work.is_racing) std::memset(work.to, kPoison, work.nbytes);
      else std::memcpy(work.to, work.from, work.nbytes);
      break;
    case Work::kPoisonBlock: std::memset(work.to, kPoison, work.nbytes); break;
  }
}

void force(int stream, uint64_t position) {
  while (queue_of(stream).num_done < position) run_front(stream);
}

void drain(int stream) { force(stream, queue_of(stream).num_submitted); }

bool can_advance(int stream) {
  Queue& queue = queue_of(stream);
  return !queue.works.empty() && (queue.works.front().kind != Work::kWait || queue.works.front().point->is_done);
}

// As much progress as the policy wants here. Never blocks, and breaks no rule: a stream stays behind what it waits for.
void let_run() {
  State& s = state();
  if (s.policy == kEarly || s.policy == kHidden) {
    for (bool any = true; any;) {
      any = false;
      for (int i = 0; i < kNumStreams; ++i)
        while (can_advance(i)) run_front(i), any = true;
    }
  } else if (s.policy == kRandom) {
    std::vector<int> able;
    for (int i = 0; i < kNumStreams; ++i)
      if (can_advance(i)) able.push_back(i);
    if (able.empty() || std::uniform_real_distribution<>()(s.random) >= s.chance) return;
    for (int left = int(s.random() % 3) + 1; left > 0; --left) {
      int stream = able[s.random() % able.size()];
      if (can_advance(stream)) run_front(stream);
    }
  }
}

void submit(int stream, Work work) {
  Queue& queue = queue_of(stream);
  ++queue.num_submitted;
  queue.works.push_back(std::move(work));
}

// -- the order of accesses ---------------------------------------------------------------------------------------------

// What is issued on `stream` from here on comes after all that the host has seen complete.
void issue(int stream) {
  Queue& queue = queue_of(stream);
  queue.clock.join(state().host);
  ++queue.clock[stream];
}

void take(int stream, double seconds) {
  Queue& queue = queue_of(stream);
  queue.now = std::max(queue.now, state().host_now) + seconds;
}

// A copy between host and device.
void take_copy(int stream, double seconds) {
  take(stream, seconds);
  const double end = queue_of(stream).now;
  if (state().speeds.share > 0) state().copies[device_of(stream)].push_back({stream, end - seconds, end});
}

// Computation, slower while copies of other streams run. All of those have been issued by now: a copy waits for what was
// computed before it was issued, so none that comes later can begin before this is over.
void take_compute(int stream, double seconds) {
  auto& copies = state().copies[device_of(stream)];
  take(stream, 0);
  double now = queue_of(stream).now, rate;
  copies.erase(std::remove_if(copies.begin(), copies.end(), [&](const Span& copy) { return copy.end <= now; }),
               copies.end());
  for (;;) {
    rate = 1;
    double next = HUGE_VAL;  // until then nothing changes
    for (const Span& copy : copies) {
      if (copy.stream == stream || copy.end <= now) continue;
      if (copy.start <= now) rate = std::max(rate - state().speeds.share, 0.1);
      next = std::min(next, copy.start <= now ? copy.end : copy.start);
    }
    if ((next - now) * rate >= seconds) break;
    seconds -= (next - now) * rate;
    now = next;
  }
  queue_of(stream).now = now + seconds / rate;
}

std::string name_of(int stream) {
  int number = stream % kStreamsPerDevice;
  return "stream " + std::to_string(number) + " of device " + std::to_string(device_of(stream));
}

void split_at(uintptr_t address) {
  auto& shadow = state().shadow;
  auto after = shadow.upper_bound(address);
  if (after == shadow.begin()) return;
  auto found = std::prev(after);
  if (found->first == address || found->second.end <= address) return;
  Segment rest = found->second;
  found->second.end = address;
  shadow.emplace(address, std::move(rest));
}

void report(const char* what, int stream, const char* verb, const char* other, int who, size_t nbytes) {
  State& s = state();
  ++s.num_violations;
  if (s.violations.size() >= kMaxViolations) return;
  s.violations.push_back(std::string(what) + " on " + name_of(stream) + " is not ordered after " + other + " on " +
                         name_of(who) + ", which " + verb + " the same " + std::to_string(nbytes) + " bytes");
}

// Whether an access of the last thing issued on `stream` races with one before it.
bool touch(int stream, const void* data, size_t nbytes, bool is_write, const char* what) {
  if (nbytes == 0 || data == nullptr) return false;
  auto& shadow = state().shadow;
  const Clock& clock = queue_of(stream).clock;
  uintptr_t start = reinterpret_cast<uintptr_t>(data), end = start + nbytes;
  split_at(start);
  split_at(end);
  bool is_racing = false;
  auto first = shadow.lower_bound(start);
  for (auto it = first; it != shadow.end() && it->first < end; ++it) {
    Segment& segment = it->second;
    if (segment.writer >= 0 && clock[segment.writer] < segment.written_at) {
      if (!is_racing) report(what, stream, "wrote", segment.what, segment.writer, segment.end - it->first);
      is_racing = true;
    }
    if (is_write) {
      for (auto& [reader, time] : segment.reads)
        if (clock[reader] < time) {
          if (!is_racing) report(what, stream, "reads", "a read", reader, segment.end - it->first);
          is_racing = true;
        }
    } else {
      auto own = std::find_if(segment.reads.begin(), segment.reads.end(), [&](auto& r) { return r.first == stream; });
      if (own == segment.reads.end()) segment.reads.emplace_back(stream, clock[stream]);
      else own->second = clock[stream];
    }
  }
  if (is_write) {
    shadow.erase(first, shadow.lower_bound(end));
    shadow.emplace(start, Segment{end, stream, clock[stream], what, {}});
  }
  return is_racing;
}

void forget(const void* data, size_t nbytes) {
  auto& shadow = state().shadow;
  uintptr_t start = reinterpret_cast<uintptr_t>(data);
  split_at(start);
  split_at(start + nbytes);
  shadow.erase(shadow.lower_bound(start), shadow.lower_bound(start + nbytes));
}

// -- device memory -----------------------------------------------------------------------------------------------------

void count(c10::CachingAllocator::StatArray& stats, int64_t change) {
  auto& stat = stats[0];
  if (change >= 0) stat.increase(size_t(change));
  else stat.decrease(size_t(-change));
}

void give_back_cached(int device) {
  State& s = state();
  for (int i = 0; i < kStreamsPerDevice; ++i) drain(device * kStreamsPerDevice + i);
  for (auto& [key, blocks] : s.free_blocks) {
    if (device_of(key.first) != device) continue;
    for (Block* block : blocks) {
      count(s.stats[device].reserved_bytes, -int64_t(block->nbytes));
      forget(block->data, block->nbytes);
      std::free(block->data);
      delete block;
    }
    blocks.clear();
  }
}

void free_block(void* context) {
  State& s = state();
  Lock lock(s.mutex);
  Block* block = static_cast<Block*>(context);
  auto& stats = s.stats[block->device];
  count(stats.allocated_bytes, -int64_t(block->nbytes));
  count(stats.active_bytes, -int64_t(block->nbytes));
  count(stats.allocation, -1);
  Queue& queue = queue_of(block->stream);
  for (int other : block->other_streams) {  // `record_stream`: the block is reused only after them
    auto point = std::make_shared<Point>();
    *point = {other, queue_of(other).num_submitted, queue_of(other).clock, queue_of(other).now, false, 0};
    submit(block->stream, {Work::kWait, point});
    queue.clock.join(point->clock);
  }
  block->other_streams.clear();
  if (block->life >= 0) {
    auto found = s.shadow.upper_bound(reinterpret_cast<uintptr_t>(block->data));
    Life& life = s.lives[size_t(block->life)];
    life.dies = s.moment++;
    if (found != s.shadow.begin()) life.what = std::prev(found)->second.what;
  }
  issue(block->stream);
  touch(block->stream, block->data, block->nbytes, true, "free");
  // Whatever its stream does next may use the block.
  if (queue.works.empty()) std::memset(block->data, kPoison, block->nbytes);
  else submit(block->stream, {Work::kPoisonBlock, nullptr, block->data, nullptr, block->nbytes});
  s.free_blocks[{block->stream, block->nbytes}].push_back(block);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    State& s = state();
    int device = current_device;
    c10::Device where(c10::DeviceType::PrivateUse1, c10::DeviceIndex(device));
    if (nbytes == 0) return {nullptr, nullptr, &free_block, where};
    Lock lock(s.mutex);
    size_t size = (nbytes + kAlign - 1) / kAlign * kAlign;
    auto& stats = s.stats[device];
    int64_t number = s.num_allocations++;
    bool is_refused = number >= s.fail_from && number < s.fail_until;
    auto used = size_t(stats.allocated_bytes[0].current);
    if (is_refused || used + size > s.cap[device]) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "stand-in out of memory. Tried to allocate ", nbytes, " bytes. Device ",
                       device, " has ", s.cap[device], " bytes, of which ", used, " are allocated.");
    }
    if (size_t(stats.reserved_bytes[0].current) + size > s.cap[device]) give_back_cached(device);
    int stream = current_streams[device];
    auto& cached = s.free_blocks[{stream, size}];
    Block* block;
    if (!cached.empty()) {
      block = cached.back();
      cached.pop_back();
    } else {
      void* data = nullptr;
      TORCH_CHECK(posix_memalign(&data, kAlign, size) == 0, "the host has no memory for the stand-in");
      std::memset(data, kPoison, size);
      block = new Block{static_cast<char*>(data), size, device, stream, {}, -1};
      count(stats.reserved_bytes, int64_t(size));
      ++stats.num_device_alloc;
    }
    count(stats.allocated_bytes, int64_t(size));
    count(stats.active_bytes, int64_t(size));
    count(stats.allocation, 1);
    s.own_peak[device] = std::max(s.own_peak[device], int64_t(stats.allocated_bytes[0].current));
    issue(stream);
    touch(stream, block->data, size, true, "allocate");
    block->life = s.watcher == nullptr ? -1 : int64_t(s.lives.size());
    if (s.watcher != nullptr) {
      s.lives.push_back({size, s.moment++, -1, ""});
      s.watcher(block->life);
    }
    return {block->data, block, &free_block, where};
  }
  static void check_statistics() {
    TORCH_CHECK(state().has_statistics, "this allocator does not yet support statistics");  // CUDAPluggableAllocator
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, std::size_t nbytes) const override { std::memcpy(dest, src, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(state().mutex);
    for (int device = 0; device < kNumDevices; ++device) give_back_cached(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(state().mutex);
    auto* block = static_cast<Block*>(data.get_context());
    if (block != nullptr && block->stream != int(stream.id())) block->other_streams.insert(int(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    check_statistics();
    return state().stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    check_statistics();
    auto& stats = state().stats[device];
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.allocation})
      (*each)[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    check_statistics();
    auto& stats = state().stats[device];
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.allocation})
      (*each)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    size_t all = std::min<size_t>(state().cap[device], size_t(1) << 33);
    size_t used = size_t(state().stats[device].allocated_bytes[0].current);
    return {all - std::min(all, used), all};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

// -- pinned memory -----------------------------------------------------------------------------------------------------

using Pinned = std::shared_ptr<void>;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &forget_pinned, c10::Device(c10::kCPU)};
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 4096, nbytes) == 0, "the host has no memory to pin");
    Lock lock(state().mutex);
    std::memset(data, kPoison, nbytes);
    forget(data, nbytes);
    auto* held = new Pinned(data, [nbytes](void* dead) {
      Lock lock(state().mutex);
      forget(dead, nbytes);
      state().pinned.erase(reinterpret_cast<uintptr_t>(dead));
      state().pinned_bytes.erase(reinterpret_cast<uintptr_t>(dead));
      std::free(dead);
    });
    state().pinned[reinterpret_cast<uintptr_t>(data)] = *held;
    state().pinned_bytes[reinterpret_cast<uintptr_t>(data)] = nbytes;
    return {data, held, &forget_pinned, c10::Device(c10::kCPU)};
  }
  static void forget_pinned(void* context) { delete static_cast<Pinned*>(context); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, std::size_t nbytes) const override { std::memcpy(dest, src, nbytes); }
};

PinnedAllocator pinned_allocator;

Pinned pinned_at(const void* data) {
  State& s = state();
  Lock lock(s.mutex);
  auto address = reinterpret_cast<uintptr_t>(data);
  auto after = s.pinned.upper_bound(address);
  if (after == s.pinned.begin()) return nullptr;
  auto found = std::prev(after);
  return address < found->first + s.pinned_bytes[found->first] ? found->second.lock() : nullptr;
}

// -- devices, streams, events ------------------------------------------------------------------------------------------

c10::Device device_number(int device) { return {c10::DeviceType::PrivateUse1, c10::DeviceIndex(device)}; }
c10::Stream stream_number(int stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_number(device_of(stream)), c10::StreamId(stream));
}
int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

// The host blocks until `stream` has done everything, and knows it.
void wait_for(int stream) {
  State& s = state();
  drain(stream);
  s.host.join(queue_of(stream).clock);
  s.host_now = std::max(s.host_now, queue_of(stream).now);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    int before = current_device;
    setDevice(device);
    return device_number(before);
  }
  c10::Device getDevice() const override { return device_number(current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kNumDevices, "the stand-in has ", kNumDevices, " devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() == current_device) return;
    current_device = device.index();
    ++num_entered[size_t(current_device)];
    ++num_entered_here[size_t(current_device)];
  }
  c10::Stream getStream(c10::Device device) const override { return stream_number(current_streams[index_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_number(index_of(device) * kStreamsPerDevice);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(state().mutex);
    int which = index_of(device);
    int& next = state().next_stream[which];
    next = next % (kStreamsPerDevice - 1) + 1;
    return stream_number(which * kStreamsPerDevice + next);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int& current = current_streams[stream.device_index()];
    c10::Stream before = stream_number(current);
    current = int(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(int(stream.id())); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<PointPtr*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    State& s = state();
    Lock lock(s.mutex);
    int number = int(stream.id());
    Queue& queue = queue_of(number);
    queue.clock.join(s.host);
    queue.now = std::max(queue.now, s.host_now);
    auto point = std::make_shared<Point>();
    *point = {number, queue.num_submitted + 1, queue.clock, queue.now, queue.works.empty(), 0};
    if (point->is_done) ++queue.num_submitted, ++queue.num_done;
    else submit(number, {Work::kMark, point});
    if (*event == nullptr) {
      *event = new PointPtr(point);
    } else {
      auto& before = *static_cast<PointPtr*>(*event);
      s.num_recorded_early += !s.host.covers(before->clock);
      before = point;
    }
    let_run();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Lock lock(state().mutex);
    PointPtr point = *static_cast<PointPtr*>(event);
    Queue& queue = queue_of(int(stream.id()));
    queue.clock.join(point->clock);
    queue.now = std::max(queue.now, point->time);
    if (!point->is_done) submit(int(stream.id()), {Work::kWait, point});
    let_run();
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    State& s = state();
    Lock lock(s.mutex);
    let_run();
    PointPtr point = *static_cast<PointPtr*>(event);
    if (s.host.covers(point->clock)) return true;
    bool is_seen = ++point->num_queries > kPatience;
    if (s.policy == kEarly) is_seen = true;
    if (s.policy == kRandom) is_seen |= std::uniform_real_distribution<>()(s.random) < s.chance;
    if (s.policy == kClock) is_seen |= point->time <= queue_of(current_streams[current_device]).now;
    if (!is_seen) return false;
    force(point->stream, point->position);
    s.host.join(point->clock);
    s.host_now = std::max(s.host_now, point->time);  // what the host issues from here on cannot begin earlier
    return true;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    let_run();
    return state().host.covers(queue_of(int(stream.id())).clock) && queue_of(int(stream.id())).works.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    wait_for(int(stream.id()));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    State& s = state();
    Lock lock(s.mutex);
    PointPtr point = *static_cast<PointPtr*>(event);
    force(point->stream, point->position);
    s.host.join(point->clock);
    s.host_now = std::max(s.host_now, point->time);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(state().mutex);
    for (int i = 0; i < kStreamsPerDevice; ++i) wait_for(device * kStreamsPerDevice + i);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    Lock lock(state().mutex);
    TORCH_CHECK(start != nullptr && end != nullptr, "an event was not recorded");
    return ((*static_cast<PointPtr*>(end))->time - (*static_cast<PointPtr*>(start))->time) * 1e3;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(device_number(device)); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(device_number(device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return pinned_at(data) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return device_number(current_device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return state().generators[device < 0 ? current_device : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    Lock lock(state().mutex);
    drain(current_streams[current_device]);
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), nbytes);
  }
};

// -- operators ---------------------------------------------------------------------------------------------------------

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// The bytes between the first and the last element.
size_t span_of(const Tensor& tensor) {
  return tensor.numel() == 0 ? 0
                             : at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

const void* data_of(const Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.unsafeGetTensorImpl()->data();
}

// The same bytes as tensors of the CPU. Tensors of one storage get aliases of one storage.
struct Aliases {
  std::map<c10::StorageImpl*, c10::Storage> storages;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // ours, alias

  Tensor of(const Tensor& tensor) {
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    auto& storage = storages[impl];
    if (!storage)
      storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
          c10::DataPtr(const_cast<void*>(impl->data()), c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true));
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(DispatchKey::CPU),
                                                            tensor.dtype());
    auto* target = alias.unsafeGetTensorImpl();
    target->set_storage_offset(tensor.storage_offset());
    target->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) target->set_wrapped_number(true);
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    pairs.emplace_back(tensor, alias);
    return alias;
  }
  const Tensor* ours(const Tensor& alias) const {
    for (auto& pair : pairs)
      if (pair.second.unsafeGetTensorImpl() == alias.unsafeGetTensorImpl()) return &pair.first;
    return nullptr;
  }
  const Tensor* ours_of_storage(const Tensor& alias) const {
    for (auto& pair : pairs)
      if (pair.second.has_storage() && alias.has_storage() && pair.second.storage().is_alias_of(alias.storage()))
        return &pair.first;
    return nullptr;
  }
};

Tensor empty_like_layout(c10::IntArrayRef size, c10::IntArrayRef stride, c10::ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1), dtype);
}

// What a CPU kernel made, on the device.
Tensor brought(const Tensor& made, int stream, bool is_racing, const char* what) {
  Tensor moved = empty_like_layout(made.sizes(), made.strides(), made.scalar_type());
  if (size_t nbytes = span_of(made)) {
    void* to = moved.unsafeGetTensorImpl()->mutable_data();
    touch(stream, to, nbytes, true, what);
    if (is_racing) std::memset(to, kPoison, nbytes);
    else std::memcpy(to, data_of(made), nbytes);
  }
  return moved;
}

std::vector<Tensor> tensors_in(c10::ArrayRef<c10::IValue> values) {
  std::vector<Tensor> found;
  for (const auto& value : values) {
    if (value.isTensor()) found.push_back(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& each : value.toTensorList()) found.push_back(each);
  }
  found.erase(std::remove_if(found.begin(), found.end(), [](auto& tensor) { return !tensor.defined(); }), found.end());
  return found;
}

// Elements that differ: what is expanded is read once.
double bytes_of(const Tensor& tensor) {
  double elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) == 0 || tensor.stride(dim) != 0) elements *= double(tensor.size(dim));
  return elements * double(tensor.itemsize());
}

// By roofline: the longer of arithmetic and traffic, and never less than a launch. `moved`: what is read, and what is made.
double seconds_of(const std::string& name, const std::vector<Tensor>& moved) {
  const Speeds& speeds = state().speeds;
  double nbytes = 0;
  for (auto& tensor : moved) nbytes += bytes_of(tensor);
  bool is_lookup = name == "aten::index_select" || name == "aten::embedding" || name == "aten::gather";
  if (is_lookup) nbytes += bytes_of(moved.back()) - bytes_of(moved.front());  // of a table, only what is taken is read
  double seconds = std::max(nbytes / speeds.memory, speeds.launch);
  bool is_product = name == "aten::mm" || name == "aten::addmm" || name == "aten::bmm" || name == "aten::baddbmm";
  size_t left = name == "aten::mm" || name == "aten::bmm" ? 0 : 1;
  if (is_product && moved.size() > left + 1 && moved[left + 1].dim() > 0)
    seconds = std::max(seconds, 2.0 * double(moved[left].numel()) * double(moved[left + 1].size(-1)) / speeds.flops);
  return seconds;
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  State& s = state();
  std::vector<c10::IValue> keep_alive;  // dies after the lock: what dies may need Python's
  Aliases aliases;
  Lock lock(s.mutex);
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto& schema = op.schema();
  const size_t num_args = schema.arguments().size();
  const size_t begin = stack->size() - num_args;
  const char* name = s.names.insert(schema.operator_name().name).first->c_str();

  std::optional<c10::Device> device;
  auto see = [&](const Tensor& tensor) {
    if (is_ours(tensor) && (!device || tensor.dim() > 0)) device = device && device->index() ? device : tensor.device();
  };
  for (size_t i = 0; i < num_args; ++i) {
    const auto& value = (*stack)[begin + i];
    keep_alive.push_back(value);
    if (value.isTensor()) see(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& each : value.toTensorList()) see(each);
    else if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& each : value.toOptionalTensorList()) { if (each) see(*each); }
    else if (value.isDevice() && !device) device = device_number(index_of(value.toDevice()));
  }
  c10::DeviceGuard device_guard(device.value_or(device_number(current_device)));
  const int stream = current_streams[current_device];
  drain(stream);
  issue(stream);

  bool is_racing = false;
  std::vector<Tensor> all, written;
  auto alias = [&](const Tensor& tensor, bool is_write) -> Tensor {
    if (!is_ours(tensor)) return tensor;
    TORCH_CHECK(tensor.device().index() == current_device || tensor.dim() == 0, name,
                ": expected all tensors to be on the same device, but found at least two");
    all.push_back(tensor);
    if (is_write) written.push_back(tensor);
    is_racing |= touch(stream, data_of(tensor), span_of(tensor), is_write, name);
    return aliases.of(tensor);
  };
  for (size_t i = 0; i < num_args; ++i) {
    auto& value = (*stack)[begin + i];
    const auto* info = schema.arguments()[i].alias_info();
    const bool is_write = info != nullptr && info->isWrite();
    if (value.isTensor()) {
      value = alias(value.toTensor(), is_write);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorList()) list.push_back(alias(each, is_write));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList())
        list.push_back(each ? std::optional<Tensor>(alias(*each, is_write)) : std::nullopt);
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isNone() && schema.arguments()[i].type()->str() == "Generator?") {
      value = s.generators[current_device];
    }
  }
  // Devices count whole numbers too; the CPU's kernel does not.
  std::optional<c10::ScalarType> whole;
  if (schema.operator_name().name == "aten::histc") {
    auto& counted = (*stack)[begin];
    if (at::isIntegralType(counted.toTensor().scalar_type(), false)) {
      whole = counted.toTensor().scalar_type();
      counted = counted.toTensor().to(at::kFloat);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  if (whole) stack->back() = stack->back().toTensor().to(*whole);
  std::vector<Tensor> moved = all;
  for (const Tensor& made : tensors_in(torch::jit::last(*stack, schema.returns().size())))
    if (!made.is_cpu() || aliases.ours_of_storage(made) == nullptr) moved.push_back(made);
  take_compute(stream, seconds_of(name, moved));

  for (auto& [ours, other] : aliases.pairs) {  // outputs that the kernel gave another size
    if (std::none_of(written.begin(), written.end(), [&](auto& w) { return w.is_same(ours); })) continue;
    bool is_moved = other.storage().data() != ours.storage().data();
    if (is_moved) {
      Tensor moved = brought(other, stream, is_racing, name);
      auto* impl = ours.unsafeGetTensorImpl();
      impl->set_storage_offset(0);
      if (ours.storage().nbytes() == 0 && ours.storage().resizable()) {  // whoever holds the storage sees its bytes
        ours.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
            moved.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr()));
        ours.storage().unsafeGetStorageImpl()->set_nbytes(moved.storage().nbytes());
      } else {
        impl->set_storage_keep_dtype(moved.storage());
      }
    }
    if (is_moved || !ours.sizes().equals(other.sizes()) || !ours.strides().equals(other.strides()))
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides());
    if (is_racing && !is_moved && span_of(ours) != 0)
      std::memset(ours.unsafeGetTensorImpl()->mutable_data(), kPoison, span_of(ours));
  }

  bool is_known_to_host = false;
  auto bring = [&](const Tensor& made) -> Tensor {
    if (!made.defined() || !made.is_cpu()) return made;
    if (const Tensor* same = aliases.ours(made)) return *same;
    if (const Tensor* base = aliases.ours_of_storage(made)) {
      Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base->storage()), base->key_set(), made.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(made.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
      return view;
    }
    return brought(made, stream, is_racing, name);
  };
  const size_t num_returns = schema.returns().size();
  const size_t first = stack->size() - num_returns;
  for (size_t i = 0; i < num_returns; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = bring(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorList()) list.push_back(bring(each));
      value = std::move(list);
    } else if (!value.isNone()) {
      is_known_to_host = true;
    }
  }
  if (is_known_to_host) wait_for(stream);
}

bool is_plain_bytes(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes().equals(b.sizes()) && a.strides().equals(b.strides()) &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  State& s = state();
  Aliases aliases;
  Lock lock(s.mutex);
  at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor& on_device = is_ours(target) ? target : source;
  c10::DeviceGuard device_guard(on_device.device());
  const int stream = current_streams[current_device];
  Queue& queue = queue_of(stream);
  const size_t nbytes = span_of(target);
  const bool crosses = is_ours(source) != is_ours(target);
  if (nbytes == 0) return target;
  if (crosses && is_plain_bytes(source, target)) {
    const Tensor& on_host = is_ours(target) ? source : target;
    Pinned pinned = pinned_at(data_of(on_host));
    issue(stream);
    bool is_racing = touch(stream, data_of(source), nbytes, false, is_ours(target) ? "copy in" : "copy out");
    is_racing |= touch(stream, data_of(target), nbytes, true, is_ours(target) ? "copy in" : "copy out");
    take_copy(stream, double(nbytes) / (is_ours(target) ? s.speeds.in : s.speeds.out) + s.speeds.latency);
    ++s.num_copies;
    submit(stream, {Work::kCopy, nullptr, static_cast<char*>(target.unsafeGetTensorImpl()->mutable_data()),
                    static_cast<const char*>(data_of(source)), nbytes, is_racing, pinned});
    if (!non_blocking || pinned == nullptr) wait_for(stream);
    else let_run();
    return target;
  }
  // Everything else is done by the time of return: strides, types, device to device (with both streams in step).
  drain(stream);
  int other = stream;
  if (!crosses && source.device() != target.device()) {
    other = current_streams[source.device().index()];
    drain(other);
    queue.clock.join(queue_of(other).clock);
  }
  issue(stream);
  bool is_racing = is_ours(source) && touch(stream, data_of(source), span_of(source), false, "copy_");
  is_racing |= is_ours(target) && touch(stream, data_of(target), nbytes, true, "copy_");
  take_compute(stream, 2.0 * double(nbytes) / s.speeds.memory + s.speeds.launch);
  Tensor to = is_ours(target) ? aliases.of(target) : target;
  Tensor from = is_ours(source) ? aliases.of(source) : source;
  to.copy_(from);
  if (is_racing) std::memset(target.unsafeGetTensorImpl()->mutable_data(), kPoison, nbytes);
  if (crosses) wait_for(stream);
  if (other != stream) queue_of(other).clock.join(queue.clock);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (!target.sizes().equals(source.sizes())) const_cast<Tensor&>(target).resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar(const Tensor& self) {
  Aliases aliases;
  Lock lock(state().mutex);
  at::AutoDispatchBelowADInplaceOrView guard;
  c10::DeviceGuard device_guard(self.device());
  const int stream = current_streams[current_device];
  drain(stream);
  issue(stream);
  touch(stream, data_of(self), span_of(self), false, "item");
  wait_for(stream);
  return at::_local_scalar_dense(aliases.of(self));
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device_number(device ? index_of(*device) : current_device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_number(device ? index_of(*device) : current_device));
  return empty_like_layout(size, stride, dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  Lock lock(state().mutex);
  drain(current_streams[current_device]);
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

void record_stream(Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

// torch's own decomposition into operators: one path, whatever the shapes.
int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, c10::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &attention_choice);
  // These have a formula for devices without a kernel of their own, whose bits are not those of the CPU's kernel.
  for (const char* name : {"native_layer_norm", "native_group_norm", "addr", "mish_backward", "silu_backward",
                           "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
}

// A copy reads and writes through the bits of conjugates and negatives itself, as that of every backend does.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The operators of autocast that the tests' models need.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using at::autocast::CastPolicy;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}  // namespace at::native

TORCH_LIBRARY(standin, m) {
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) { return state().generators[device].get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [](int64_t device, const Tensor& value) { state().generators[device].set_state(value); });
}

// -- what tests ask and say --------------------------------------------------------------------------------------------

extern "C" {

void standin_start() {
  static Hooks* hooks = new Hooks;
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(hooks);
}

// Everything queued runs; then the adversary plays by another policy.
void standin_play(int policy, uint64_t seed, double chance) {
  State& s = state();
  Lock lock(s.mutex);
  for (int i = 0; i < kNumStreams; ++i) wait_for(i);
  s.policy = Policy(policy);
  s.random.seed(seed);
  s.chance = chance;
}

void standin_set_cap(int device, int64_t nbytes) {
  Lock lock(state().mutex);
  state().cap[device] = nbytes < 0 ? SIZE_MAX : size_t(nbytes);
}

// The allocations with the numbers from `first` up to `last` (not included), counted from now, find no memory.
void standin_refuse(int64_t first, int64_t last) {
  State& s = state();
  Lock lock(s.mutex);
  s.fail_from = first < 0 ? -1 : s.num_allocations + first;
  s.fail_until = first < 0 ? -1 : s.num_allocations + last;
}

// The most bytes that were allocated at once since the last call.
int64_t standin_take_peak(int device) {
  State& s = state();
  Lock lock(s.mutex);
  int64_t peak = s.own_peak[device];
  s.own_peak[device] = s.stats[device].allocated_bytes[0].current;
  return peak;
}

// From now on `watcher` hears of each block that is given out; null: nobody does.
void standin_watch(void (*watcher)(int64_t)) {
  Lock lock(state().mutex);
  state().watcher = watcher;
}

int64_t standin_moment() { return state().moment; }

// What is known of a life: who wrote last to the block, and its bytes and moments.
const char* standin_life(int64_t number, int64_t* nbytes, int64_t* born, int64_t* dies) {
  Lock lock(state().mutex);
  const Life& life = state().lives[size_t(number)];
  *nbytes = int64_t(life.nbytes), *born = life.born, *dies = life.dies;
  return life.what;
}

int64_t standin_num_allocations() { return state().num_allocations; }
int64_t standin_num_copies() { return int64_t(state().num_copies); }

// How often other threads than the caller's went over to a device.
int64_t standin_num_entered(int device) {
  return int64_t(num_entered[size_t(device)] - num_entered_here[size_t(device)]);
}

// How often an event was recorded that the host had not seen complete: where an event has one state for all, whoever
// still waits for the recording before waits for this one.
int64_t standin_num_recorded_early() { return int64_t(state().num_recorded_early); }

void standin_set_statistics(int has_them) {
  Lock lock(state().mutex);
  state().has_statistics = has_them != 0;
}

void standin_set_speeds(double out, double in, double memory, double flops, double launch, double latency, double share) {
  Lock lock(state().mutex);
  state().speeds = {out, in, memory, flops, launch, latency, share};
}

// Seconds on the clock of the calling thread's current stream.
double standin_now() {
  Lock lock(state().mutex);
  return queue_of(current_streams[current_device]).now;
}

int64_t standin_num_queued() {
  Lock lock(state().mutex);
  int64_t num = 0;
  for (auto& queue : state().queues)
    for (auto& work : queue.works) num += work.kind == Work::kCopy;
  return num;
}

int64_t standin_num_violations() { return int64_t(state().num_violations); }

const char* standin_violation(int64_t number) {
  Lock lock(state().mutex);
  return number < int64_t(state().violations.size()) ? state().violations[size_t(number)].c_str() : nullptr;
}

void standin_forget_violations() {
  Lock lock(state().mutex);
  state().violations.clear();
  state().num_violations = 0;
}

void standin_seed(int device, uint64_t seed) {
  Lock lock(state().mutex);
  state().generators[device].set_current_seed(seed);
}

}  // extern "C"
