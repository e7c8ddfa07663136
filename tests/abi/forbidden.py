# SPDX-License-Identifier: Apache-2.0
"""What no object of the library may refer to, and why: read by the scripts that look at the core's objects and at the plugin's."""
import fnmatch
import re
import subprocess

# Names as the linker sees them; * stands for any characters.
FORBIDDEN = {
    "ends the process or the thread": [
        "exit", "_exit", "_Exit", "quick_exit", "abort", "__assert*_fail", "raise", "kill", "killpg", "tgkill", "pthread_kill",
        "sigqueue", "pthread_exit", "pthread_cancel", "_ZSt9terminatev", "_ZSt10unexpectedv", "__clang_call_terminate",
        "__cxa_call_terminate", "__cxa_call_unexpected", "__cxa_pure_virtual", "__cxa_deleted_virtual",
        "_ZSt21__glibcxx_assert_fail*", "_ZNSt6__*22__libcpp_verbose_abort*", "errx", "verrx", "err", "verr", "error"],
    "prints or writes": [
        "printf", "fprintf", "vprintf", "vfprintf", "dprintf", "vdprintf", "__*printf_chk", "puts", "fputs", "putchar", "putc",
        "_IO_putc", "fputc", "fwrite", "perror", "psignal", "psiginfo", "warn", "vwarn", "warnx", "vwarnx", "stdout", "stderr",
        "write", "writev", "pwrite*", "send", "sendto", "sendmsg", "syslog", "vsyslog", "__*syslog_chk", "openlog", "fopen*",
        "fdopen", "freopen*", "creat*", "_ZSt4cout", "_ZSt4cerr", "_ZSt4clog", "_ZNSt8ios_base4InitC1Ev"],
    "throws": [
        "__cxa_throw", "__cxa_rethrow", "__cxa_allocate_exception", "__cxa_bad_*", "__cxa_throw_bad_*", "_ZSt*__throw_*",
        "_ZNSt3__1*__throw_*", "_ZSt17rethrow_exception*", "_ZNSt6thread*", "_ZNSt18condition_variable*", "longjmp", "_longjmp",
        "siglongjmp", "__longjmp_chk"],
    "registers code for the exit": ["atexit", "__cxa_atexit", "__cxa_thread_atexit*", "at_quick_exit", "on_exit"],
    "changes the process": [
        "setenv", "putenv", "unsetenv", "clearenv", "setlocale", "uselocale", "signal", "sigaction", "chdir", "umask", "fork",
        "vfork", "posix_spawn*", "exec[lv]*", "system", "popen"],
}
# Formatting into a buffer, also as distributions harden it.
ALLOWED = ["__snprintf_chk", "__vsnprintf_chk"]
# Host memory comes from the context's allocator.
ALLOCATION = re.compile(r"malloc|calloc|realloc|reallocarray|free|aligned_alloc|(posix_)?memalign|strdup|_Zn[wa]\w+|_Zd[la]P\w+")


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def why_forbidden(symbol):
    """What is wrong with a reference to the symbol; None if nothing is."""
    if symbol in ALLOWED:
        return None
    for why, patterns in FORBIDDEN.items():
        if any(fnmatch.fnmatchcase(symbol, pattern) for pattern in patterns):
            return why
    return None


def undefined(nm, path, *options):
    """What an object, or with -D a library, refers to."""
    return [line.split()[-1].split("@")[0] for line in output(nm, "-u", *options, path).splitlines()
            if line.strip() and not line.endswith(":")]


def section_sizes(readelf, path):
    sizes = {}
    for match in re.finditer(r"\]\s+(\.\S+)\s+\S+\s+\w+\s+\w+\s+([0-9a-f]+)", output(readelf, "-SW", path)):
        sizes[match[1]] = sizes.get(match[1], 0) + int(match[2], 16)
    return sizes
