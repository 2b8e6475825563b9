// The extension: registers the device type `cuda` with torch, and what tests ask of it.
#include "operators.h"

namespace py = pybind11;
using namespace simulated;

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", simulated::empty);
  m.impl("empty_strided", simulated::empty_strided);
  m.impl("copy_", simulated::copy_);
  m.impl("_copy_from", simulated::copy_from);
  m.impl("resize_", simulated::resize_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", simulated::as_strided);
  m.impl("view", simulated::view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("record_stream", simulated::record_stream);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  // These have decompositions, which round differently from the CPU kernels.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

namespace {

struct Register {
  Register() {
    c10::SetAllocator(c10::DeviceType::CUDA, &device_allocator, 200);
    at::setHostAllocator(c10::DeviceType::CUDA, &pinned_allocator, 200);
  }
} registered;

// Launch a Python function on the current stream. It runs with the interpreter lock, whenever the
// stream gets there, on whichever thread.
void launch_python(py::function function, const std::string& name, bool meets_ranks) {
  auto* kept = new py::function(std::move(function));
  std::shared_ptr<py::function> shared(kept, [](py::function* each) {
    py::gil_scoped_acquire gil;
    delete each;
  });
  Job job;
  job.name = name;
  job.meets_ranks = meets_ranks;
  job.run = [shared] {
    py::gil_scoped_acquire gil;
    (*shared)();
  };
  Locked locked;
  if (keep_launches) launches.push_back(name);
  enqueue(current_device, current_stream[current_device], std::move(job));
}

void begin_capture() {
  Locked locked;
  TORCH_CHECK(!capturing, "simulated CUDA: a graph is being captured already");
  capturing = std::make_shared<Graph>();
}

std::shared_ptr<Graph> end_capture() {
  Locked locked;
  auto graph = std::move(capturing);
  capturing = nullptr;
  return graph;
}

void replay(const std::shared_ptr<Graph>& graph) {
  Locked locked;
  for (auto& [where, job] : graph->jobs)
    streams[where.first][current_stream[where.first]].jobs.push_back(job);
}

void drain() {
  Locked locked;
  for (int device = 0; device < DEVICES; device++)
    for (int64_t id = 0; id < stream_count[device]; id++)
      run_until(locked.lock(), device, id, [] { return false; });
}

// Run a stream to its end without counting it: for threads that stand for the device itself.
void run_stream(int device, int64_t stream) {
  Locked locked;
  run_until(locked.lock(), device, stream, [] { return false; });
}

std::vector<std::pair<std::string, int64_t>> take_waits() {
  std::vector<Wait> taken;
  {
    Locked locked;
    taken.swap(waits);
  }
  std::vector<std::pair<std::string, int64_t>> result;
  for (auto& wait : taken) result.emplace_back(wait.kind, wait.thread);
  return result;
}

std::vector<std::string> pending(int device, int64_t stream) {
  std::vector<std::string> names;
  Locked locked;
  for (auto& job : streams[device][stream].jobs) names.push_back(job.name);
  return names;
}

std::vector<std::string> record_launches(bool on) {
  Locked locked;
  auto taken = std::move(launches);
  launches.clear();
  keep_launches = on;
  return taken;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def_readonly("invalidated", &Graph::invalidated);
  m.def("set_order", &set_order);
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("replay", &replay);
  m.def("capturing", [] { return capturing != nullptr; });
  m.def("drain", &drain);
  m.def("run_stream", &run_stream);
  m.def("launch", &launch_python, py::arg("function"), py::arg("name"), py::arg("meets_ranks"));
  m.def("take_waits", &take_waits);
  m.def("record_launches", &record_launches);
  m.def("pending", &pending);
  m.def("bytes_of", [](const Tensor& tensor) { return bytes_of(tensor); });
  m.def("set_device", &set_current_device);
  m.def("current_device", [] { return current_device; });
  m.def("resize_storage", [](const Tensor& tensor, size_t bytes) {
    resize_storage(tensor.storage(), bytes);
  });
  m.def("default_generator", [](int index) { return default_generator(index); });
}
