/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of tests/capi use of cmocka, for processors for which no cmocka is installed (tests/full/cross). */
#ifndef LLA_STAND_IN_CMOCKA_H
#define LLA_STAND_IN_CMOCKA_H

struct CMUnitTest {
  const char *name;
  void (*run)(void **);
};
#define cmocka_unit_test(function) \
  { #function, function }

static jmp_buf stand_in_failed;

#define fail_msg(...)                               \
  do {                                              \
    fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
    fprintf(stderr, __VA_ARGS__);                   \
    fprintf(stderr, "\n");                          \
    longjmp(stand_in_failed, 1);                    \
  } while (0)

#define cmocka_run_group_tests(tests, setup, teardown) stand_in_run(tests, sizeof(tests) / sizeof((tests)[0]))

/* The number of tests that failed. */
static inline int stand_in_run(const struct CMUnitTest *tests, size_t count) {
  volatile int failures = 0;
  volatile size_t i;
  for (i = 0; i < count; ++i) {
    if (setjmp(stand_in_failed) == 0) {
      void *nothing = NULL;
      tests[i].run(&nothing);
    } else {
      fprintf(stderr, "failed: %s\n", tests[i].name);
      ++failures;
    }
  }
  printf("%d of %d tests failed\n", failures, (int)count);
  return count == 0 ? 1 : failures;
}

#endif
