package apikey

import (
	"io/fs"
	"syscall"
)

// stateOf says which version of a file this is. Every change is a new file.
func stateOf(fi fs.FileInfo) fileState {
	s := fileState{modified: fi.ModTime(), size: fi.Size()}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		s.inode = st.Ino
	}
	return s
}
