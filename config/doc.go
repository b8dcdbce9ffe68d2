// Package config reads the configuration: environment variables with the prefix
// FENCERIDER_, secrets also from files.
//
// It owns the names, defaults, units and ranges of all settings; the table in
// README is made from the same struct. It must never show a secret: the type
// [Secret] hides itself in every form, and URLs are shown without their password.
//
// An unknown name is an error that tells the nearest known one: a setting that is
// silently ignored is the one that somebody relied on. Everything that is wrong
// is told at once.
package config
