// Package testfs has directories and file systems for tests.
//
//	MemoryDir, DiskFS      a directory in memory that looks like one on a disk
//	NewHiding              hides removed files while they are open, as FUSE and NFS do
//	CopyTree               copies a directory, with the holes of its files
//	UnpackTree, ParseTree  a directory tree that is stored as one text file
//
// # Directories in memory
//
// MemoryDir is for tests that repeat what other tests do on the disk, for each fault or each byte
// of a file: there the disk adds nothing but waits. On 2 cores with a virtual disk, the life of a
// volume took 8 ms in /tmp and 1 ms in memory (2026-11-23).
//
// # Trees as text
//
// Recorded machines are whole trees, whose /sys is made of links and of names such as 0000:3b:00.0.
// Neither can be in a Go module (its archive leaves links out, and a colon in any file's name makes
// "go get" refuse the whole module), so a tree is stored as text and unpacked where a test needs it.
//
//	what machine this is (a comment, up to the first header)
//	-- sys/block/sda -> ../devices/pci0000:00/0000:00:17.0/ata1/block/sda --
//	-- mnt/data/ --
//	-- sys/devices/pci0000:00/0000:00:17.0/numa_node --
//	-1
//
// A header line begins with "-- " and ends with " --"; between them is a path below the root of the
// tree. A path that ends with a slash is a directory. One with " -> " is a symbolic link and its
// target. The target may be missing unless it is above the tree, so that dangling links can be
// recorded too. Any other path is a file whose text is the lines that follow. This is the txtar
// format of Go's own tests with links and directories added.
//
// All functions may be called at the same time.
package testfs
