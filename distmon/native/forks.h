// A forked process has none of its parent's threads, whatever libraries remember of them.
#pragma once

// Begins to watch; called once when the module is loaded.
void watch_forks();

// Whether this process is such a one.
bool is_forked();
