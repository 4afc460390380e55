package main

import (
	"log/slog"
	"os"
	"runtime"
	"strconv"
)

// processors is how many of so many processors an agent uses at once: half of them. The packets of a TUN are sealed in
// the agent, while those whom it carries them for need the machine as well; and with all processors each packet is
// handed from one to another several times, so that its cost is higher by a third ("make bench").
func processors(have int) int { return max(1, have/2) }

// limitProcessors keeps this process to its processors, if GOMAXPROCS does not say how many they are.
func limitProcessors(log *slog.Logger) {
	if n, err := strconv.Atoi(os.Getenv("GOMAXPROCS")); err == nil && n > 0 { // which the runtime has taken
		return
	}
	have := runtime.GOMAXPROCS(0) // which heeds the limits of a control group
	runtime.GOMAXPROCS(processors(have))
	log.Debug("processors", "used", processors(have), "of", have, "otherwise", "set GOMAXPROCS")
}
