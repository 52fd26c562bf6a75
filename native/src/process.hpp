// What /proc tells about the process behind a request.
#pragma once

namespace ckptfs {

// The thread group of a thread, or 0 when it is not known (another PID namespace, or gone).
int process_of_thread(int tid);

// Whether the thread is being ended by a signal: the low 7 bits of field 52 of /proc/TID/stat, proc(5).
bool dying_of_signal(int tid);

}  // namespace ckptfs
