"""The pure packages: values, rules and files that every party agrees on."""
