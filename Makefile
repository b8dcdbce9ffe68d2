# The developer's commands. `make help` lists them; CONTRIBUTING.md says when to
# use which.
SHELL := /bin/bash
SERVICES := deploy/services.sh
STATE := $(CURDIR)/.cache
TOOL := go tool -modfile=.tools/go.mod

.DEFAULT_GOAL := help
.PHONY: help demo demo-down test check bench fuzz build generate clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build bin/fencerider
	go build -trimpath -o bin/fencerider ./cmd/fencerider

demo: ## show the main job on real services: two sidecars, two workers, one target
	@deploy/demo/run.sh up

demo-down: ## stop what `make demo` started
	@deploy/demo/run.sh down

test: ## install and start real services, then run every test with the race detector
	@deploy/test.sh

check: ## formatting, linters, generated files
	@deploy/check.sh

bench: ## run every benchmark, ratios against a peer in the same run
	@deploy/test.sh bench

fuzz: ## run every fuzz target for a short while
	@deploy/test.sh fuzz

clean: ## remove what was built
	rm -rf bin $(STATE)
