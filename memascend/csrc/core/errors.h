// Errors of the torch-free core. The bindings map each kind to a Python exception type.
#pragma once

#include <stdexcept>
#include <string>

namespace memascend {

enum class ErrorKind { kInvalidArgument, kOutOfMemory, kState };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace memascend
