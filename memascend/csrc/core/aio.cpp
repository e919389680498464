#include "aio.h"

#include "errors.h"

namespace memascend {

const char* aio_kind_name(AioKind kind) noexcept { return kind == AioKind::kUring ? "io_uring" : "libaio"; }

std::unique_ptr<AioBackend> make_backend(AioKind kind, int depth, const std::vector<int>& files, IoSyscalls& calls) {
  return kind == AioKind::kUring ? make_uring(depth, files, calls) : make_libaio(depth, files, calls);
}

std::string aio_missing(AioKind kind, IoSyscalls& calls) {
  try {
    (void)make_backend(kind, 1, {}, calls);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

AioKind choose_aio(const std::string& name, IoSyscalls& calls) {
  if (name != "auto" && name != "io_uring" && name != "libaio") {
    throw Error(ErrorKind::kInvalidArgument,
                "storage engine: unknown backend '" + name + "': use auto, io_uring or libaio");
  }
  if (name == "libaio") {
    return AioKind::kLibaio;
  }
  const std::string missing = aio_missing(AioKind::kUring, calls);
  if (missing.empty()) {
    return AioKind::kUring;
  }
  if (name == "io_uring") {
    throw Error(ErrorKind::kState, missing);
  }
  return AioKind::kLibaio;
}

}  // namespace memascend
