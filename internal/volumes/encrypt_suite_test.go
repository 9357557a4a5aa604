package volumes_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
)

// suite is what holds for every volume, whether it encrypts or not.
var suite = map[string]func(*testing.T){
	"TestTrimGivesRoomBack":                     TestTrimGivesRoomBack,
	"TestTrimEndsWithItsContext":                TestTrimEndsWithItsContext,
	"TestTrimIdleGivesBackWhatNothingNeeds":     TestTrimIdleGivesBackWhatNothingNeeds,
	"TestTrimIdleGivesBackWhatIsCut":            TestTrimIdleGivesBackWhatIsCut,
	"TestTrimIdleMindsTheReserve":               TestTrimIdleMindsTheReserve,
	"TestNegativeIdleKeepsAll":                  TestNegativeIdleKeepsAll,
	"TestFailedPunchIsWarnedOfAndLosesNothing":  TestFailedPunchIsWarnedOfAndLosesNothing,
	"TestRequestsUnderWay":                      TestRequestsUnderWay,
	"TestCancellation":                          TestCancellation,
	"TestEndedContextBeginsNothing":             TestEndedContextBeginsNothing,
	"TestErrorsNameThePlace":                    TestErrorsNameThePlace,
	"TestTransfersThatNeverProgressEnd":         TestTransfersThatNeverProgressEnd,
	"TestCounters":                              TestCounters,
	"TestEveryOperationFailsOnce":               TestEveryOperationFailsOnce,
	"TestFileThatPanicsAtOnce":                  TestFileThatPanicsAtOnce,
	"TestVolumeKeepsThePoolContract":            TestVolumeKeepsThePoolContract,
	"TestConfigIsChecked":                       TestConfigIsChecked,
	"TestOpenErrorsAreClear":                    TestOpenErrorsAreClear,
	"TestKindsOfFiles":                          TestKindsOfFiles,
	"TestFreedExtentsAreReusedFirst":            TestFreedExtentsAreReusedFirst,
	"TestSmallestFitIsTaken":                    TestSmallestFitIsTaken,
	"TestSplitting":                             TestSplitting,
	"TestFragmentedRoom":                        TestFragmentedRoom,
	"TestRoomIsTakenInStepsAndWithinTheReserve": TestRoomIsTakenInStepsAndWithinTheReserve,
	"TestFullFileSystem":                        TestFullFileSystem,
	"TestOtherErrorsOfGrowthAreNotNoSpace":      TestOtherErrorsOfGrowthAreNotNoSpace,
	"TestCloseWithMemoryOut":                    TestCloseWithMemoryOut,
	"TestCloseAndTheLastFreeMeet":               TestCloseAndTheLastFreeMeet,
	"TestFreeDuringATransferWaitsForIt":         TestFreeDuringATransferWaitsForIt,
	"TestFreeTwicePanics":                       TestFreeTwicePanics,
	"TestWrongSizesAreRefused":                  TestWrongSizesAreRefused,
	"TestTwoVolumesInOneDirectory":              TestTwoVolumesInOneDirectory,
	"TestVanishedDirectory":                     TestVanishedDirectory,
	"TestConcurrentUseUnderTrim":                TestConcurrentUseUnderTrim,
}

// persistSuite is what holds for every volume that keeps.
var persistSuite = map[string]func(*testing.T){
	"TestPersistedMemoriesAreThereAfterwards": TestPersistedMemoriesAreThereAfterwards,
	"TestPersistedStaysUntilTaken":            TestPersistedStaysUntilTaken,
	"TestPersistedPlaceChanges":               TestPersistedPlaceChanges,
	"TestTwoVolumesPersistApart":              TestTwoVolumesPersistApart,
	"TestTwoKeptDirectories":                  TestTwoKeptDirectories,
	"TestNothingPersistsThere":                TestNothingPersistsThere,
	"TestTwoVolumesAfterTwoCrashes":           TestTwoVolumesAfterTwoCrashes,
	"TestTwoVolumesOfOneEngine":               TestTwoVolumesOfOneEngine,
	"TestClosedVolumeLeavesTheNextOneAlone":   TestClosedVolumeLeavesTheNextOneAlone,
	"TestRoomWaitsForTheEnd":                  TestRoomWaitsForTheEnd,
	"TestHeaderTakesRoom":                     TestHeaderTakesRoom,
	"TestShrunkFile":                          TestShrunkFile,
	"TestPersistedEndOfASparseFile":           TestPersistedEndOfASparseFile,
	"TestMutatedFiles":                        TestMutatedFiles,
	"TestUnreadableHeaderLosesNothing":        TestUnreadableHeaderLosesNothing,
	"TestMoreThanTheCapacityIsLeftAlone":      TestMoreThanTheCapacityIsLeftAlone,
	"TestOtherFormatIsLeftAlone":              TestOtherFormatIsLeftAlone,
	"TestHugeClaimsAllocateNothing":           TestHugeClaimsAllocateNothing,
	"TestPersistingSurvivesEveryFault":        TestPersistingSurvivesEveryFault,
	"TestRandomPersisting":                    TestRandomPersisting,
	"TestFileThatCannotBeRemoved":             TestFileThatCannotBeRemoved,
	"TestReadDuringRename":                    TestReadDuringRename,
}

// others are tests in the same files that a key makes no difference to, or that write parts of pages,
// which volumes that encrypt refuse.
var others = map[string]bool{
	"TestMain": true, "TestMemoryFileSystemIsWarnedOf": true, "TestRequestsEndOnPages": true,
	"TestAnyAlignment": true,
}

// TestTheSuiteOnEncryptedVolumes runs the tests of volumes once more.
func TestTheSuiteOnEncryptedVolumes(t *testing.T) {
	runEncrypted(t, suite, "trim_test.go", "main_test.go", "transfer_test.go", "volume_test.go")
}

// TestThePersistSuiteOnEncryptedVolumes runs the tests of volumes that keep once more.
func TestThePersistSuiteOnEncryptedVolumes(t *testing.T) {
	runEncrypted(t, persistSuite, "persist_test.go", "persist_damage_test.go")
}

// runEncrypted runs tests of some files with volumes that encrypt. No test of those files may
// be forgotten in their list.
func runEncrypted(t *testing.T, suite map[string]func(*testing.T), files ...string) {
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if d, ok := d.(*ast.FuncDecl); ok && strings.HasPrefix(d.Name.Name, "Test") && suite[d.Name.Name] == nil && !others[d.Name.Name] {
				t.Errorf("%s of %s is in no list", d.Name.Name, file)
			}
		}
	}
	encrypted = true
	defer func() { encrypted = false }()
	left := testseed.Rounds(len(suite), len(suite)/5) // in each run it may be others
	for name, test := range suite {
		if left--; left >= 0 {
			t.Run(name, test)
		}
	}
}
