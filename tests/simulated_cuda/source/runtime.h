// Streams, events and waits of the simulated devices.
//
// A stream is a queue of jobs. Nothing runs when it is launched: a job runs when the host waits for
// it, or when the seeded order lets its stream advance. Two streams are ordered by events only, so
// code that forgets an event reads memory before it is written, in every run with the same seed.
#pragma once
#include <Python.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace simulated {

constexpr int DEVICES = 2;
constexpr int STREAMS = 256;
constexpr int POLLS = 50;  // queries of an event after which it has been reached at the latest
constexpr double JOB_MILLISECONDS = 0.01;  // device time of every job: timings repeat exactly

struct Event {
  uint64_t recorded = 0;  // how often it was recorded, and up to which of them the stream came
  uint64_t reached = 0;
  int device = 0;
  int64_t stream = 0;
  double milliseconds = 0;
  bool captured = false;
  uint64_t asked = 0;
};
using EventPointer = std::shared_ptr<Event>;

struct Job {
  std::function<void()> run;
  std::string name;
  EventPointer records, waits_for;
  uint64_t version = 0;
  bool meets_ranks = false;  // a collective: other processes have to run theirs
};

struct Stream {
  std::deque<Job> jobs;
  bool busy = false;  // a thread is inside the first job, without the lock
  double speed = 0;   // jobs that run for each launch or query, on average
};

struct Wait {
  std::string kind;
  int64_t thread;
};

struct Graph {
  std::vector<std::pair<std::pair<int, int64_t>, Job>> jobs;
  std::vector<std::function<void()>> freed;  // memory that the graph keeps
  bool invalidated = false;
};

inline std::mutex mutex;
inline std::condition_variable changed;
inline Stream streams[DEVICES][STREAMS];
inline int64_t stream_count[DEVICES] = {1, 1};
inline double clock_ms[DEVICES] = {0, 0};
inline std::mt19937 random_order;
inline bool has_order = false;
inline std::shared_ptr<Graph> capturing;
inline std::vector<Wait> waits;
inline std::vector<std::string> launches;
inline bool keep_launches = false;
inline thread_local int current_device = 0;
inline thread_local int64_t current_stream[DEVICES] = {0, 0};

// The lock of everything here. A thread that waits for it must not hold the interpreter lock.
class Locked {
  std::optional<pybind11::gil_scoped_release> without_gil_;
  std::unique_lock<std::mutex> lock_;

 public:
  Locked() {
    if (Py_IsInitialized() && PyGILState_Check()) without_gil_.emplace();
    lock_ = std::unique_lock(mutex);
  }
  std::unique_lock<std::mutex>& lock() { return lock_; }
  ~Locked() { lock_.unlock(); }
};

// A job runs as if no mode, autograd or autocast of the calling thread existed.
class WithoutModes {
  c10::impl::ForceDispatchKeyGuard guard_;
  static c10::impl::LocalDispatchKeySet keys() {
    c10::impl::PODLocalDispatchKeySet set;
    set.set_included(c10::DispatchKeySet(c10::DispatchKey::BackendSelect));
    set.set_excluded(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::default_excluded_set |
        c10::autocast_dispatch_keyset);
    return c10::impl::LocalDispatchKeySet(set);
  }

 public:
  WithoutModes() : guard_(keys()) {}
};

inline void not_while_capturing(const char* call) {
  if (!capturing) return;
  capturing->invalidated = true;
  TORCH_CHECK(false, "simulated CUDA: operation not permitted when stream is capturing: ", call);
}

inline void count_wait(const std::string& kind) {
  waits.push_back({kind, static_cast<int64_t>(syscall(SYS_gettid))});
}

// Run the first job of a stream with the lock released. The stream must not be busy or empty.
inline void run_first(std::unique_lock<std::mutex>& lock, int device, Stream& stream) {
  Job job = std::move(stream.jobs.front());
  stream.jobs.pop_front();
  if (job.run) {
    stream.busy = true;
    lock.unlock();
    {
      WithoutModes guard;
      try {
        job.run();
      } catch (const std::exception& error) {
        fprintf(stderr, "simulated CUDA: %s failed: %s\n", job.name.c_str(), error.what());
        _exit(70);  // a device that fails ends the process
      }
    }
    job.run = nullptr;
    lock.lock();
    stream.busy = false;
    clock_ms[device] += JOB_MILLISECONDS;
  }
  if (job.records) {
    job.records->reached = std::max(job.records->reached, job.version);
    job.records->milliseconds = clock_ms[device];
  }
  changed.notify_all();
}

// Run jobs of a stream, and whatever they wait for, until `enough` or until it is empty.
inline void run_until(
    std::unique_lock<std::mutex>& lock, int device, int64_t id, const std::function<bool()>& enough) {
  Stream& stream = streams[device][id];
  while (!enough()) {
    if (stream.busy) {
      changed.wait(lock);
      continue;
    }
    if (stream.jobs.empty()) return;
    if (EventPointer event = stream.jobs.front().waits_for) {
      auto version = stream.jobs.front().version;
      if (event->reached < version) {
        run_until(lock, event->device, event->stream, [&] { return event->reached >= version; });
        if (event->reached >= version) continue;  // another thread may have run the wait meanwhile
      }
      if (!stream.jobs.empty() && stream.jobs.front().waits_for == event) stream.jobs.pop_front();
      changed.notify_all();
      continue;
    }
    run_first(lock, device, stream);
  }
}

inline bool is_ready(const Stream& stream) {
  if (stream.busy || stream.jobs.empty() || stream.jobs.front().meets_ranks) return false;
  const Job& first = stream.jobs.front();
  return !first.waits_for || first.waits_for->reached >= first.version;
}

// Let every stream run some of the jobs that are ready, in the seeded order.
inline void advance(std::unique_lock<std::mutex>& lock) {
  if (!has_order) return;
  for (int device = 0; device < DEVICES; device++)
    for (int64_t id = 0; id < stream_count[device]; id++) {
      Stream& stream = streams[device][id];
      if (stream.speed <= 0) continue;
      auto count = std::poisson_distribution<int>(stream.speed)(random_order);
      while (count-- > 0 && is_ready(stream)) run_first(lock, device, stream);
    }
}

inline void draw_speed(Stream& stream) {
  constexpr double speeds[] = {0, 0.3, 1, 5};
  stream.speed = has_order ? speeds[random_order() % 4] : 0;
}

// 0: nothing runs before the host waits for it. Other seeds: streams advance at random speeds.
inline void set_order(uint32_t seed) {
  Locked locked;
  has_order = seed != 0;
  random_order.seed(seed);
  for (auto& device : streams)
    for (auto& stream : device) draw_speed(stream);
}

inline void enqueue(int device, int64_t stream, Job job) {
  if (capturing)
    capturing->jobs.push_back({{device, stream}, std::move(job)});
  else
    streams[device][stream].jobs.push_back(std::move(job));
}

inline void launch(int device, std::function<void()> run, const std::string& name) {
  Locked locked;
  Job job;
  job.run = std::move(run);
  job.name = name;
  if (keep_launches) launches.push_back(name);
  enqueue(device, current_stream[device], std::move(job));
  advance(locked.lock());
}

inline void wait_for_stream(int device, int64_t stream, const std::string& kind) {
  Locked locked;
  not_while_capturing(kind.c_str());
  count_wait(kind);
  run_until(locked.lock(), device, stream, [] { return false; });
}

inline void wait_for_device(int device, const std::string& kind) {
  Locked locked;
  not_while_capturing(kind.c_str());
  count_wait(kind);
  for (int64_t id = 0; id < stream_count[device]; id++)
    run_until(locked.lock(), device, id, [] { return false; });
}

inline void record_event(const EventPointer& event, int device, int64_t stream) {
  event->device = device;
  event->stream = stream;
  event->captured = capturing != nullptr;
  Job job;
  job.name = "record";
  job.records = event;
  job.version = ++event->recorded;
  enqueue(device, stream, std::move(job));
}

inline void make_stream_wait(const EventPointer& event, int device, int64_t stream) {
  if (event->captured) return;  // inside the graph jobs run in the order of their launch
  Job job;
  job.name = "wait";
  job.waits_for = event;
  job.version = event->recorded;
  enqueue(device, stream, std::move(job));
}

}  // namespace simulated
