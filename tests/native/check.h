// A minimal test framework. A test is a function that registers itself; CHECK reports and counts failures and
// continues, so that one run shows all of them.
#pragma once

#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace check {

struct Test {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline int& failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* name, std::function<void()> body) { tests().push_back({name, std::move(body)}); }
};

inline void report(bool good, const char* expression, const char* file, int line, const std::string& note) {
  if (!good) {
    ++failures();
    std::cerr << file << ':' << line << ": CHECK(" << expression << ") failed " << note << '\n';
  }
}

// Returns the message of the Error that `body` throws, or an empty string if it throws none.
template <typename ErrorType>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace check

#define CHECK(condition) check::report(static_cast<bool>(condition), #condition, __FILE__, __LINE__, "")
#define CHECK_NOTE(condition, note) check::report(static_cast<bool>(condition), #condition, __FILE__, __LINE__, note)
#define TEST(name)                                                        \
  static void test_##name();                                              \
  static const check::Registration registered_##name(#name, test_##name); \
  static void test_##name()

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNDER_SANITIZER 1  // for example, sanitizers make mlock do nothing
#else
#define UNDER_SANITIZER 0
#endif
