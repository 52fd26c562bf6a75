// The only file that knows Python. The contract is ckptfs/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "checksum.hpp"
#include "data_plane.hpp"
#include "extent_row.hpp"
#include "switch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ckptfs {

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

nb::object named_tuple(const char* name, const nb::tuple& fields) {
  static const nb::handle module = nb::module_::import_("ckptfs.native_types").release();  // for ever
  return module.attr(name)(*fields);
}

nb::tuple event_tuple(const Event& event) {
  const auto& n = event.numbers;
  switch (event.kind) {
    case EventKind::sealed:
      return nb::make_tuple("sealed", n[0], n[1], nb::bytes(event.bytes.data(), event.bytes.size()));
    case EventKind::flush:
      return nb::make_tuple("flush", n[0], n[1], n[2], n[3]);
    case EventKind::fsync:
      return nb::make_tuple("fsync", n[0], n[1], n[2], n[3]);
    case EventKind::fsyncdir:
      return nb::make_tuple("fsyncdir", n[0], n[1], n[2], n[3]);
    case EventKind::sync_write:
      return nb::make_tuple("sync_write", n[0], n[1], n[2]);
    case EventKind::interrupt:
      return nb::make_tuple("interrupt", n[0]);
    case EventKind::grant_wanted:
      return nb::make_tuple("grant_wanted", n[0]);
    case EventKind::no_room:
      return nb::make_tuple("no_room", n[0]);
    case EventKind::kill_suidgid:
      return nb::make_tuple("kill_suidgid", n[0]);
    case EventKind::page_cache_wanted:
      return nb::make_tuple("page_cache_wanted", n[0]);
    case EventKind::device_error:
      return nb::make_tuple("device_error", n[0], event.bytes, n[1], n[2], n[3]);
    case EventKind::bad_checksum:
      return nb::make_tuple("bad_checksum", n[0], n[1], n[2], n[3], n[4]);
    case EventKind::initialised:
      return nb::make_tuple("initialised");
    case EventKind::disconnected:
      return nb::make_tuple("disconnected");
  }
  throw std::logic_error("an event of no kind");
}

nb::object attributes_tuple(const FileAttributes& a) {
  return named_tuple("FileAttributes", nb::make_tuple(a.size_bytes, a.mtime_ns, a.ctime_ns, a.allocated_bytes));
}

nb::dict device_dict(const DeviceCounters& device) {
  nb::dict dict;
  dict["name"] = device.name;
  dict["written_bytes"] = device.written_bytes;
  dict["read_bytes"] = device.read_bytes;
  dict["outstanding_bytes"] = device.outstanding_bytes;
  dict["write_errors"] = device.write_errors;
  dict["read_errors"] = device.read_errors;
  dict["checksum_errors"] = device.checksum_errors;
  dict["granted_bytes"] = device.granted_bytes;
  return dict;
}

nb::dict data_plane_statistics(DataPlane& data_plane) {
  const DataPlaneCounters counters = data_plane.counters();
  nb::dict dict;
  dict["io_backend"] = counters.io_backend;
  dict["io_backend_reason"] = counters.io_backend_reason;
  dict["buffers_registered"] = counters.buffers_registered;
  dict["files_registered"] = counters.files_registered;
  dict["staging_limit_bytes"] = counters.staging.limit_bytes;
  dict["staging_populated_bytes"] = counters.staging.populated_bytes;
  dict["staging_used_bytes"] = counters.staging.used_bytes;
  dict["staging_dirty_bytes"] = counters.staging.dirty_bytes;
  dict["unwritten_bytes"] = counters.staging.dirty_bytes;
  dict["parked_writes"] = counters.parked_writes;
  dict["bytes_acknowledged"] = counters.acknowledged_bytes;
  nb::list devices;
  for (const DeviceCounters& device : counters.devices) devices.append(device_dict(device));
  dict["devices"] = devices;
  return dict;
}

nb::dict switch_statistics(Switch& sw) {
  const SwitchCounters counters = sw.counters();
  nb::dict dict;
  dict["max_write_bytes"] = counters.max_write_bytes;
  dict["reader_threads"] = counters.reader_threads;
  dict["protocol_minor"] = counters.protocol_minor;
  dict["forwarded"] = counters.forwarded;
  nb::dict requests;
  for (const auto& [name, count] : counters.requests) requests[name.c_str()] = count;
  dict["requests"] = requests;
  dict["kernel_features"] = counters.kernel_features;
  return dict;
}

void bind_data_plane(nb::module_& module) {
  nb::class_<DataPlane>(module, "DataPlane")
      .def(
          "__init__",
          [](DataPlane* self, std::vector<int> device_fds, std::vector<std::string> device_names,
             uint64_t staging_limit_bytes, std::string io_backend, bool keep_killed) {
            new (self) DataPlane({std::move(device_fds), std::move(device_names), staging_limit_bytes,
                                  std::move(io_backend), keep_killed});
          },
          nb::kw_only(), "device_fds"_a, "device_names"_a, "staging_limit_bytes"_a, "io_backend"_a = "auto",
          "keep_killed"_a = false)
      .def("start", &DataPlane::start, Unlocked())
      .def("stop", &DataPlane::stop, Unlocked())
      .def_prop_ro("event_fd", [](DataPlane& self) { return self.events().fd(); })
      .def("take_events",
           [](DataPlane& self) {
             nb::list list;
             for (const Event& event : self.events().take()) list.append(event_tuple(event));
             return list;
           })
      .def("grant", &DataPlane::grant, "device_index"_a, "ranges"_a, Unlocked())
      .def("add_free", &DataPlane::add_free, "length_bytes"_a, Unlocked())
      .def_prop_ro("free_bytes", &DataPlane::free_bytes)
      .def("add_free_metadata", &DataPlane::add_free_metadata, "length_bytes"_a, Unlocked())
      .def_prop_ro("free_metadata_bytes", &DataPlane::free_metadata_bytes)
      .def("expire_no_room", &DataPlane::expire_no_room, Unlocked())
      .def(
          "register",
          [](DataPlane& self, uint64_t ino, uint64_t size_bytes, int64_t mtime_ns, int64_t ctime_ns, nb::bytes rows,
             bool set_id) {
            const std::string packed(rows.c_str(), rows.size());
            const nb::gil_scoped_release unlocked;
            self.register_file(ino, size_bytes, mtime_ns, ctime_ns, packed, set_id);
          },
          "ino"_a, nb::kw_only(), "size_bytes"_a, "mtime_ns"_a, "ctime_ns"_a, "rows"_a, "set_id"_a = false)
      .def("unregister", &DataPlane::unregister_file, "ino"_a, Unlocked())
      .def("forget", &DataPlane::forget_file, "ino"_a, Unlocked())
      .def("is_registered", &DataPlane::is_registered, "ino"_a)
      .def("attributes",
           [](DataPlane& self, uint64_t ino) -> nb::object {
             const auto attributes = self.attributes(ino);
             return attributes ? attributes_tuple(*attributes) : nb::none();
           })
      .def("state",
           [](DataPlane& self, uint64_t ino) -> nb::object {
             const auto s = self.state(ino);
             if (!s) return nb::none();
             return named_tuple("FileState", nb::make_tuple(s->modified, s->killed, s->log, s->unsealed_bytes,
                                                            s->unwritten_bytes, s->error));
           })
      .def("set_append", &DataPlane::set_append, "ino"_a, Unlocked())
      .def("set_set_id", &DataPlane::set_set_id, "ino"_a, "set_id"_a, Unlocked())
      .def("note_modified", &DataPlane::note_modified, "ino"_a, "pid"_a, Unlocked())
      .def("truncate", &DataPlane::truncate, "ino"_a, "size_bytes"_a, "time_ns"_a, "pid"_a, Unlocked())
      .def("set_times", &DataPlane::set_times, "ino"_a, "mtime_ns"_a.none(), "ctime_ns"_a.none(), Unlocked())
      .def("seal",
           [](DataPlane& self, uint64_t ino) -> nb::object {
             std::optional<SealResult> seal;
             {
               const nb::gil_scoped_release unlocked;
               seal = self.seal(ino);
             }
             if (!seal) return nb::none();
             return named_tuple("Seal", nb::make_tuple(seal->seal_id, seal->size_bytes, seal->mtime_ns, seal->ctime_ns,
                                                       seal->truncate_to_bytes, seal->metadata_bytes));
           })
      .def("revert",
           [](DataPlane& self, uint64_t ino, uint64_t lost_ino) {
             FileAttributes restored{};
             {
               const nb::gil_scoped_release unlocked;
               restored = self.revert(ino, lost_ino);
             }
             return attributes_tuple(restored);
           })
      .def("set_error", &DataPlane::set_error, "ino"_a, "errno"_a, Unlocked())
      .def("refuse_writes", &DataPlane::refuse_writes, "errno"_a)
      .def("flush_all", &DataPlane::flush_all, Unlocked())
      .def("statistics", &data_plane_statistics);
}

void bind_switch(nb::module_& module) {
  nb::class_<Switch>(module, "Switch")
      .def(nb::init<DataPlane&, int, uint32_t, unsigned>(), nb::keep_alive<1, 2>(), "data_plane"_a, nb::kw_only(),
           "fuse_fd"_a, "max_write_bytes"_a, "reader_threads"_a)
      .def_prop_ro("control_fd", &Switch::control_fd)
      .def("start", &Switch::start, Unlocked())
      .def("stop", &Switch::stop, Unlocked())
      .def("reply", &Switch::reply, "unique"_a, "errno"_a, Unlocked())
      .def("reply_write", &Switch::reply_write, "unique"_a, "length_bytes"_a, Unlocked())
      .def("statistics", &switch_statistics);
}

}  // namespace

}  // namespace ckptfs

NB_MODULE(_native, module) {
  module.doc() = "The data plane of ckptfs: switch, staging, flush engine and reader.";
  module.attr("EXTENT_ROW_BYTES") = sizeof(ckptfs::ExtentRow);
  module.def(
      "checksum", [](nb::bytes data) { return ckptfs::checksum(data.c_str(), data.size()); }, "data"_a);
  const nb::module_ types = nb::module_::import_("ckptfs.native_types");
  for (const char* name : {"FileAttributes", "FileState", "Seal"}) module.attr(name) = types.attr(name);
  ckptfs::bind_data_plane(module);
  ckptfs::bind_switch(module);
}
