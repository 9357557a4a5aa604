package disk

import (
	"errors"
	"os"
)

// errOwner: where everybody may make directories, as in a directory of temporary files,
// others could have their bytes adopted, and have ours in files of theirs.
var errOwner = errors.New("it belongs to another user")

// checkOwner says whether a directory is not ours. What belongs to the owner of the volume's
// directory is as good: he could do with ours what he likes.
func (v *Volume) checkOwner(path string) error {
	info, err := v.cfg.FS.Stat(path)
	if err != nil {
		return ignoreMissing(err)
	}
	uid, known := ownerOf(info)
	if !known || int(uid) == os.Geteuid() {
		return nil
	}
	info, err = v.cfg.FS.Stat(v.dir)
	if err != nil {
		return err
	}
	if above, _ := ownerOf(info); above != uid {
		return errOwner
	}
	return nil
}
