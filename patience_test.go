package spillway_test

import "time"

const patience = 2 * time.Minute
